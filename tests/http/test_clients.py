"""HTTP of a real stack, to which OpenAI's and Anthropic's own clients talk."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.model import resolve_model
from nano_vllm_grpc import LLM, SamplingParams
from tests.others import more_clients, others_python, smollm2
from tests.stack import DEMO_MODEL, RealStack, running_stack

HERE = Path(__file__).parent
LLAMAINDEX = "llamaindex_checks"  # which needs another environment
MODULES = ("openai_checks", "responses_checks", "anthropic_checks", "objects_checks", LLAMAINDEX)
PROMPT = "Once upon a time"
QUESTION = "Where does Anna live?"


def input_of_checks(stack: RealStack) -> dict[str, Any]:
    """The URL of a stack and the answers over gRPC."""
    greedy = SamplingParams(temperature=0)
    with LLM(stack.address) as llm:
        (completion,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))
        (answer,) = llm.chat([{"role": "user", "content": QUESTION}], greedy)
        prompt_tokens = len(llm.tokenize(PROMPT))
        (embedding,) = llm.embed(PROMPT)
    return {
        "url": stack.stack.url,
        "question": QUESTION,
        "prompt": PROMPT,
        "prompt_tokens": prompt_tokens,
        "embedding": embedding,
        "completion": completion["text"],
        "answer": answer["text"],
    }


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    with running_stack(http_port="auto", frontends=2) as stack:
        yield input_of_checks(stack)


@pytest.fixture(scope="module")
def given_smollm2() -> Iterator[dict[str, Any]]:
    model = resolve_model(str(smollm2()))
    # In float32 a token does not depend on the step in which it is sampled.
    settings = {"served_model_name": "demo", "dtype": "float32"}
    with running_stack(model=model, http_port="auto", **settings) as stack:
        yield input_of_checks(stack)


def more_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(more_clients()), "HF_HUB_OFFLINE": "1"}


@cache
def ends_of(module: str, given: str) -> dict[str, str]:
    python, environment = others_python(), None
    if module == LLAMAINDEX:
        python, environment = Path(sys.executable), more_environment()
    run = subprocess.run(
        [python, "checks.py", module, given],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    ends: dict[str, str] = json.loads(run.stdout)
    return ends


def names_of(module: str) -> list[str]:
    """The checks of a module, which cannot be imported here."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("check_")]


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in names_of(module)]
)
def test_others_clients(given: dict[str, Any], module: str, name: str) -> None:
    assert not (end := ends_of(module, json.dumps(given))[name]), end


# What the demo model was trained for; SmolLM2's chat template shows no tools.
SKILLS = ("check_tools", "check_tools_of_a_stream", "check_tools_not_called")


@pytest.mark.parametrize("name", [n for n in names_of("openai_checks") if n not in SKILLS])
def test_others_clients_of_smollm2(given_smollm2: dict[str, Any], name: str) -> None:
    assert not (end := ends_of("openai_checks", json.dumps(given_smollm2))[name]), end


def test_guidellm(given: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's load generator."""
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={given['url']},model=demo"]
    command += ["--profile", "kind=concurrent,streams=4"]
    command += ["--constraint", "kind=max_requests,count=20"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=24"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    run = subprocess.run(
        command, cwd=tmp_path, env=more_environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = report["metrics"]
    assert metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == 20
    counts = metrics["output_token_count"]["successful"]
    assert counts["min"] == counts["max"] == 24
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


def test_aiperf(given: dict[str, Any], tmp_path: Path) -> None:
    """NVIDIA's AIPerf, whose figures are its own."""
    command = [others_python().with_name("aiperf"), "profile", "--model=demo"]
    command += [f"--url={given['url']}", "--endpoint-type=chat", "--streaming"]
    command += [f"--tokenizer={DEMO_MODEL}", "--use-server-token-count", "--ui=none"]
    command += ["--concurrency=8", "--request-count=40", "--random-seed=1"]
    command += ["--workers-max=1", "--record-processors=1"]  # each is a process
    command += ["--no-gpu-telemetry", "--no-server-metrics"]
    command += ["--synthetic-input-tokens-mean=32", "--output-tokens-mean=24"]
    command += ["--extra-inputs=ignore_eos:true", f"--artifact-dir={tmp_path}"]
    # Its own processes have half a minute to start by default.
    limits = ("AIPERF_SERVICE_REGISTRATION_TIMEOUT", "AIPERF_SERVICE_START_TIMEOUT")
    environment = {**os.environ, **dict.fromkeys(limits, "300")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 40
    assert not report["error_summary"]
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == 24
    assert report["time_to_first_token"]["avg"] > 0
