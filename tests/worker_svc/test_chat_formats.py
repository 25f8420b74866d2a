"""The gateway's parsers, by the chat templates of models that people run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.model import resolve_model
from tests.others import smollm2
from tools.make_model import DEMO_MODEL
from worker_svc.errors import ModelError
from worker_svc.models.chat_formats import Parsers, choose_parsers

# The ends of templates.
CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = "{{- '<tool_call>\n' }}"
QWEN3 = (
    "{%- if '</think>' in content %}{%- endif %}" + CALLS + "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is "
    "false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
QWEN3_THINKING = (
    CALLS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- '<|python_tag|>' + tool_call.name }}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
R1 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}{% set content = content.split('</think>') %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)


@pytest.mark.parametrize(
    ("architecture", "template", "parsers"),
    [
        ("Qwen3ForCausalLM", None, Parsers("qwen3", "qwen")),
        ("Qwen3ForCausalLM", QWEN3, Parsers("qwen3", "qwen")),
        ("Qwen3ForCausalLM", QWEN3_THINKING, Parsers("deepseek_r1", "qwen")),
        ("Qwen2ForCausalLM", CHATML, Parsers(None, "qwen")),
        ("Qwen2ForCausalLM", R1, Parsers("deepseek_r1", "deepseek")),
        ("LlamaForCausalLM", None, Parsers(None, "llama")),
        ("LlamaForCausalLM", LLAMA3, Parsers(None, "llama")),
        ("LlamaForCausalLM", R1, Parsers("deepseek_r1", "deepseek")),
        ("LlamaForCausalLM", LLAMA3 + CALLS, Parsers(None, "qwen")),  # Hermes 3
    ],
)
def test_parsers_are_those_of_the_template_else_of_the_family(
    tmp_path: Path, architecture: str, template: str | None, parsers: Parsers
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    assert choose_parsers(tmp_path) == parsers
    if template:
        config.write_text(json.dumps({"chat_template": [{"name": "a", "template": template}]}))
        assert choose_parsers(tmp_path) == parsers
        config.unlink()
        (tmp_path / "chat_template.jinja").write_text(template)
        assert choose_parsers(tmp_path) == parsers


def test_parsers_of_models_that_are_here() -> None:
    assert choose_parsers(DEMO_MODEL) == Parsers("qwen3", "qwen")
    assert choose_parsers(resolve_model(str(smollm2()))) == Parsers(None, "qwen")


@pytest.mark.parametrize("text", ["[]", "{", '{"chat_template": [{}]}', '{"chat_template": 1}'])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match="model: cannot read its chat template"):
        choose_parsers(tmp_path)
