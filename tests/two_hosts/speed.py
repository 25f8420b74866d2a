"""Compares pipeline stages on two hosts with one worker, which has all cores.

    python -m tests.two_hosts.speed --model DIR [--delays-ms 0,2] [--out FILE]

The hosts are network namespaces of this machine, whose packets arrive some milliseconds after they
were sent. One has the frontend, the scheduler and the first stage. Each round measures the single
worker and the pipelines one after the other, since the machine's speed varies. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

from nano_vllm_grpc import LLM, SamplingParams
from tests.stack import ROOT
from tests.waiting import wait_for

Runner = Callable[..., str]

_PORT, _WARM_UP_TOKENS = 50051, 16
_ADDRESSES = ("10.78.0.1", "10.78.0.2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--pp-layers", default="")
    parser.add_argument("--delays-ms", default="0,2", help="one way; %(default)s")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens; %(default)s")
    parser.add_argument("--tokens", type=int, default=192, help="per stream; %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of the server, for the client
    options = parser.parse_args()
    if options.address:
        print(json.dumps(_measure(options)))
        return
    kinds: dict[str, float | None] = {"one worker": None}
    kinds |= {f"two stages, {each} ms": float(each) for each in options.delays_ms.split(",")}
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, delay_ms in kinds.items():
            with _serving(options, delay_ms) as run:
                found = run("-m", "tests.two_hosts.speed", *sys.argv[1:], "--address=127.0.0.1")
            figures[kind].append(json.loads(found))
            print(f"{kind}: {figures[kind][-1]:.1f} tokens/s", flush=True)
    one = figures["one worker"]
    ratios = {
        kind: round(median(a / b for a, b in zip(found, one, strict=True)), 3)
        for kind, found in figures.items()
    }
    print(ratios)
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        result = {"settings": settings, "tokens_per_s": figures, "ratios": ratios}
        options.out.write_text(json.dumps(result, indent=1))


def _measure(options: argparse.Namespace) -> float:
    """The tokens per second of all streams."""
    llm, rng = LLM(f"{options.address}:{_PORT}"), Random(0)

    def run(num_tokens: int) -> float:
        prompts = [
            [rng.randrange(1000) for _ in range(options.prompt)] for _ in range(options.streams)
        ]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        began = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        return options.streams * num_tokens / (time.monotonic() - began)

    run(_WARM_UP_TOKENS)
    return run(options.tokens)


def _environment(options: argparse.Namespace, num_ranks: int) -> dict[str, str]:
    return {
        **os.environ,
        "NANO_MODEL": options.model,
        "NANO_QUANTIZATION": options.quantization,
        "NANO_KV_DTYPE": options.kv_dtype,
        "NANO_PP": str(num_ranks),
        "NANO_PP_LAYERS": options.pp_layers if num_ranks > 1 else "",
        "NANO_THREADS": str(len(os.sched_getaffinity(0)) // num_ranks),
        "NANO_SPECULATION": "none",
        "NANO_MAX_NUM_SEQS": str(options.streams),
        "NANO_KV_BLOCKS": str(options.streams * (options.prompt + options.tokens + 16) // 16),
        "NANO_SCHEDULER_ADDRESS": f"{_ADDRESSES[0]}:50052",
        "NANO_WORKER_ADDRESSES": ",".join(f"{each}:50053" for each in _ADDRESSES[:num_ranks]),
        "NANO_MASTER_ADDR": _ADDRESSES[0],
        "NANO_PORT": str(_PORT),
        "NANO_ALLOW_PLAINTEXT": "1",
    }


@contextmanager
def _serving(options: argparse.Namespace, delay_ms: float | None) -> Iterator[Runner]:
    """Serves with one worker, or with two stages on two hosts, and yields a function that runs
    Python on the first host."""
    names = [f"{each}{os.getpid()}" for each in ("one", "two")]
    num_ranks = 1 if delay_ms is None else 2
    environment = _environment(options, num_ranks)
    processes: list[subprocess.Popen[str]] = []

    def start(host: int, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", names[host], sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        processes.append(process)
        return process

    def run(*arguments: str) -> str:
        client = start(0, *arguments)
        output, _ = client.communicate()
        assert client.returncode == 0, "the client failed"
        return output

    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    try:
        ends = [word for pair in zip(names, _ADDRESSES, strict=True) for word in pair]
        link = subprocess.Popen(
            [sys.executable, "-m", "tests.two_hosts.link", *ends, str(delay_ms or 0.0)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(link)
        assert link.stdout
        assert link.stdout.readline() == "ready\n", "no link between the hosts"
        for rank in range(num_ranks):
            start(rank, "-m", "worker_svc", "--rank", str(rank))
        start(0, "-m", "scheduler_svc")
        start(0, "-m", "frontend")
        check = "from deploy.health import *; exit(check_health('127.0.0.1:50051') != SERVING)"
        wait_for(lambda: start(0, "-c", check).wait() == 0, "the frontend to serve", 120)
        yield run
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=True)


if __name__ == "__main__":
    main()
