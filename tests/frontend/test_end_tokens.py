"""The tokens that end an answer, from all files of a model that name any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.settings import FrontendSettings
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.conftest import DEMO, Service
from tests.frontend.fake_scheduler import FakeScheduler

IM_END, END_OF_TEXT = 1535, 1533
ABSENT: Any = object()
AS_OBJECT = {
    "__type": "AddedToken",
    "content": "<|im_end|>",
    **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False),
}


def change(path: Path, name: str, value: Any) -> None:
    """Sets or removes a field of a file, which is a link to the demo model's."""
    fields = json.loads(path.read_text())
    fields.pop(name, None)
    path.unlink()
    path.write_text(json.dumps(fields if value is ABSENT else fields | {name: value}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model, whose tokenizer's end token is <|im_end|>."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in DEMO.iterdir():
        (directory / path.name).symlink_to(path)
    return directory


@pytest.fixture
def settings(settings: FrontendSettings, model: Path, request: Any) -> FrontendSettings:
    """For the model with end tokens of generation_config.json, config.json and the tokenizer."""
    generation, config, eos_token = request.param
    change(model / "generation_config.json", "eos_token_id", generation)
    change(model / "config.json", "eos_token_id", config)
    change(model / "tokenizer_config.json", "eos_token", eos_token)
    return settings.model_copy(update={"model": str(model)})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((END_OF_TEXT, None, AS_OBJECT), [END_OF_TEXT, IM_END]),
        (([7, 1536], [8], "<|im_end|>"), [7, 8, IM_END]),
        ((None, None, None), []),
    ],
    indirect=["settings"],
)
async def test_all_requests_have_one_set_of_end_tokens(
    service: Service, scheduler: FakeScheduler, expected: list[int]
) -> None:
    model = await service.stub.GetModel(pb.GetModelRequest())
    assert list(model.eos_token_ids) == expected

    async def ends(request: pb.GenerateRequest, **sampling: Any) -> list[int]:
        request.sampling.MergeFrom(pb.SamplingParams(max_tokens=2, **sampling))
        await service.stub.Generate(request)
        return sorted((await scheduler.submits.get()).sampling.eos_token_ids)

    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert await ends(pb.GenerateRequest(chat=chat)) == sorted(expected)
    for sampling in (
        {},
        {"min_tokens": 1},
        {"structured_output": pb.StructuredOutput(regex="a*")},
    ):
        assert await ends(pb.GenerateRequest(text="hi"), **sampling) == sorted(expected)
    assert await ends(pb.GenerateRequest(text="hi"), ignore_eos=True) == []


def test_special_tokens_map_names_a_tokenizers_end(model: Path) -> None:
    """In the files of old checkpoints."""
    for name in ("eos_token", "added_tokens_decoder", "additional_special_tokens"):
        change(model / "tokenizer_config.json", name, ABSENT)
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = Tokenizer(model, threads=1)
    tokenizer.close()
    assert tokenizer.eos_token_ids == (IM_END,)
