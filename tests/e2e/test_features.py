"""Every sampling and output feature through the public API, against transformers and with the same
tokens on every path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from nano_vllm_grpc.pb.frontend_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    Chat,
    ChatMessage,
    Choice,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StructuredOutput,
    TokenIds,
    TokenizeRequest,
)
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.e2e.transformers_model import TransformersModel, token_prompts
from tests.stack import running_stack

TIMEOUT_S = 100
PROMPT = "Once upon a time, there was a little fox who"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "hen"]},
        "legs": {"type": "integer", "minimum": 1, "maximum": 9},
        "wild": {"type": "boolean"},
    },
    "required": ["name", "legs", "wild"],
    "additionalProperties": False,
}


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **fields})


def structured(**kind: Any) -> SamplingParams:
    output = StructuredOutput(**kind)
    return SamplingParams(max_tokens=120, seed=5, structured_output=output)


# Each is greedy or sampled with a seed, so it has one right answer on every path.
FEATURES: dict[str, SamplingParams] = {
    "plain": sampling(temperature=0.9, seed=1),
    "top_k": sampling(temperature=1.3, seed=2, top_k=20),
    "top_p": sampling(temperature=1.0, seed=3, top_p=0.8),
    "min_p": sampling(temperature=1.5, seed=4, min_p=0.05),
    "all filters": sampling(temperature=2.0, seed=5, top_k=50, top_p=0.95, min_p=0.01),
    "repetition": sampling(temperature=0, repetition_penalty=1.3),
    "presence, frequency": sampling(
        temperature=0.7, seed=6, presence_penalty=1.5, frequency_penalty=-0.5
    ),
    "all penalties": sampling(
        temperature=1.0,
        seed=7,
        top_k=40,
        repetition_penalty=0.8,
        presence_penalty=-0.4,
        frequency_penalty=1.2,
    ),
    "bias": sampling(temperature=0.8, seed=8, logit_bias={300: 6.5, 301: -100.0}),
    "bad words": sampling(temperature=0.8, seed=8, bad_words=["fox", "was", "a little"]),
    "min_tokens": sampling(
        temperature=1.0, seed=9, ignore_eos=False, min_tokens=20, stop_token_ids=[11, 12, 13, 14]
    ),
    "logprobs": sampling(temperature=1.0, seed=10, logprobs=3, prompt_logprobs=2),
    "n": sampling(temperature=1.0, seed=11, n=3),
    "beams": SamplingParams(max_tokens=16, beam_width=3),
    "schema": structured(json_schema=json.dumps(SCHEMA)),
    "regex": structured(regex=r"(yes|no), [a-z]{3,8}!"),
}


@pytest.fixture
def stub(demo_stack: str) -> Iterator[InferenceServiceStub]:
    with grpc.insecure_channel(demo_stack) as channel:
        yield InferenceServiceStub(channel)


def request_for(params: SamplingParams, text: str = PROMPT, **fields: Any) -> GenerateRequest:
    return GenerateRequest(text=text, sampling=params, **fields)


def run_all(address: str, requests: list[GenerateRequest]) -> list[GenerateResponse]:
    """Sends all requests at once."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(len(requests)) as pool:
        stub = InferenceServiceStub(channel)
        return list(pool.map(lambda r: stub.Generate(r, timeout=TIMEOUT_S), requests))


def tokens_of(response: GenerateResponse) -> list[list[int]]:
    return [list(completion.token_ids) for completion in response.completions]


@pytest.fixture(scope="module")
def alone(demo_stack: str) -> dict[str, GenerateResponse]:
    """Each feature's answer, from one request after another."""
    return {
        name: run_all(demo_stack, [request_for(params)])[0] for name, params in FEATURES.items()
    }


def check_all(address: str, alone: dict[str, GenerateResponse]) -> None:
    """Runs all features twice, all at once, among plain requests of other lengths."""
    crowd = [
        request_for(sampling(temperature=1.0, seed=90 + i, max_tokens=10 + 3 * i), PROMPT * i)
        for i in range(1, 5)
    ]
    wanted = [request_for(params) for params in FEATURES.values()]
    answers = run_all(address, [*wanted, *crowd, *wanted])
    names = list(FEATURES)
    for name, answer in zip(names, answers, strict=False):
        assert tokens_of(answer) == tokens_of(alone[name]), name
    for name, answer in zip(names, answers[-len(names) :], strict=True):
        assert tokens_of(answer) == tokens_of(alone[name]), name


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"tp": 2, "frontends": 2, "sync": 1},
        {"kv_blocks": 24, "block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 5},
    ],
    ids=["defaults", "two ranks, no step ahead", "preempted, short chunks"],
)
def configured(request: pytest.FixtureRequest, demo_stack: str) -> Iterator[str]:
    """The address of a stack with settings that must not matter."""
    if not request.param:
        yield demo_stack
        return
    with running_stack(**request.param) as stack:
        yield stack.address


def test_no_configuration_changes_a_token(
    configured: str, alone: dict[str, GenerateResponse]
) -> None:
    check_all(configured, alone)


def test_no_configuration_changes_what_transformers_would_say(
    configured: str, oracle: TransformersModel
) -> None:
    prompts = token_prompts(len(oracle.tokenizer), 20)
    expected = [[oracle.greedy(p, 40, ignore_eos=True)] for p in prompts]
    params = sampling(temperature=0, max_tokens=40)
    requests = [GenerateRequest(token_ids=TokenIds(ids=p), sampling=params) for p in prompts]
    assert [tokens_of(answer) for answer in run_all(configured, requests)] == expected


def test_a_bad_word_gives_way_at_its_last_token(
    stub: InferenceServiceStub, oracle: TransformersModel
) -> None:
    (before,) = stub.Generate(request_for(sampling(temperature=0)), timeout=TIMEOUT_S).completions
    tokens, tried = list(before.token_ids), set()
    for word in dict.fromkeys(before.text.split()):
        ids = oracle.encode(" " + word)
        if (place := place_of(ids, tokens)) is None:
            continue
        request = request_for(sampling(temperature=0, bad_words=[word]))
        (answer,) = stub.Generate(request, timeout=TIMEOUT_S).completions
        found, last = list(answer.token_ids), place + len(ids) - 1
        assert found[:last] == tokens[:last], word
        assert found[last] != tokens[last], word
        assert place_of(ids, found) is place_of(oracle.encode(word), found) is None, word
        tried.add(len(ids))
    assert {1, 2} <= tried


def place_of(part: list[int], tokens: list[int]) -> int | None:
    return next((at for at in range(len(tokens)) if tokens[at : at + len(part)] == part), None)


def test_a_chat_is_rendered_and_ends_by_itself(
    stub: InferenceServiceStub, oracle: TransformersModel
) -> None:
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    rendered = oracle.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    prompt_ids = oracle.encode(rendered)
    expected = oracle.greedy(prompt_ids, 200, ignore_eos=False)
    chat = Chat(messages=[ChatMessage(**m) for m in messages])
    params = SamplingParams(temperature=0, max_tokens=200)
    answer = stub.Generate(GenerateRequest(chat=chat, sampling=params), timeout=TIMEOUT_S)
    (completion,) = answer.completions
    assert completion.finish_reason == FINISH_REASON_EOS
    assert list(completion.token_ids) == expected
    assert completion.text == oracle.tokenizer.decode(expected, skip_special_tokens=True)
    assert "42" in completion.text
    assert answer.usage.prompt_tokens == len(prompt_ids)


@pytest.mark.parametrize("name", FEATURES)
def test_a_stream_joined_is_the_unary_answer(
    name: str, stub: InferenceServiceStub, alone: dict[str, GenerateResponse]
) -> None:
    whole = alone[name]
    chunks = list(stub.GenerateStream(request_for(FEATURES[name]), timeout=TIMEOUT_S))
    for index, completion in enumerate(whole.completions):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == completion.text
        ids: list[int] = []
        for chunk in mine:
            assert chunk.token_offset == len(ids)
            ids += chunk.token_ids
        assert ids == list(completion.token_ids)
        assert not any(chunk.finish_reason for chunk in mine[:-1])
        assert mine[-1].finish_reason == completion.finish_reason
        joined = [row for chunk in mine for row in chunk.logprobs]
        assert [list(r.entries) for r in joined] == [list(r.entries) for r in completion.logprobs]
    assert list(chunks[0].prompt_logprobs) == list(whole.prompt_logprobs)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("name", [n for n in FEATURES if n not in ("n", "beams")])
def test_a_resumed_stream_goes_on_as_if_never_interrupted(
    name: str, stub: InferenceServiceStub, alone: dict[str, GenerateResponse]
) -> None:
    (completion,) = alone[name].completions
    ids = list(completion.token_ids)
    for cut in (1, len(ids) // 2, len(ids) - 1, len(ids)):
        request = request_for(FEATURES[name], resume_token_ids=ids[:cut])
        chunks = list(stub.GenerateStream(request, timeout=TIMEOUT_S))
        assert [t for chunk in chunks for t in chunk.token_ids] == ids[cut:]
        assert chunks[0].token_offset == cut
        assert completion.text.endswith("".join(chunk.text for chunk in chunks))
        assert chunks[-1].finish_reason == completion.finish_reason
        assert chunks[-1].stop_reason == completion.stop_reason


def test_completions_of_n_are_those_of_consecutive_seeds(
    stub: InferenceServiceStub, alone: dict[str, GenerateResponse]
) -> None:
    answer = alone["n"]
    assert [c.index for c in answer.completions] == [0, 1, 2]
    for index, completion in enumerate(answer.completions):
        single = SamplingParams()
        single.CopyFrom(FEATURES["n"])
        single.n = 1
        single.seed += index
        other = stub.Generate(request_for(single), timeout=TIMEOUT_S)
        assert list(completion.token_ids) == list(other.completions[0].token_ids)
        assert completion.text == other.completions[0].text
    assert answer.usage.completion_tokens == 3 * 24


@pytest.mark.parametrize("penalty", [0.7, 1.2])
def test_repetition_penalty_equals_transformers(
    penalty: float, stub: InferenceServiceStub, oracle: TransformersModel
) -> None:
    prompt = oracle.encode(PROMPT)
    (expected,) = oracle.generate(prompt, 40, repetition_penalty=penalty, eos_token_id=None)
    params = sampling(temperature=0, repetition_penalty=penalty, max_tokens=40)
    answer = stub.Generate(request_for(params), timeout=TIMEOUT_S)
    assert tokens_of(answer) == [expected]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_equals_transformers(
    width: int, length_penalty: float, stub: InferenceServiceStub, oracle: TransformersModel
) -> None:
    prompt = oracle.encode("What is 3 + 4?")
    expected = oracle.generate(
        prompt,
        20,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=False,
    )
    ends = set(oracle.model.generation_config.eos_token_id)
    for row in expected:  # cut the padding
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        del row[end + 1 :]
    params = SamplingParams(max_tokens=20, beam_width=width, length_penalty=length_penalty)
    answer = stub.Generate(request_for(params, "What is 3 + 4?"), timeout=TIMEOUT_S)
    assert tokens_of(answer) == expected
    assert [c.score for c in answer.completions] == sorted(
        (c.score for c in answer.completions), reverse=True
    )


def test_logprobs_equal_transformers(
    alone: dict[str, GenerateResponse], oracle: TransformersModel, stub: InferenceServiceStub
) -> None:
    answer = alone["logprobs"]
    prompt, (completion,) = oracle.encode(PROMPT), answer.completions
    ids = list(completion.token_ids)
    expected = oracle.logprobs(prompt + ids)
    assert len(answer.prompt_logprobs) == len(prompt)
    assert not answer.prompt_logprobs[0].entries
    positions = [
        *(
            (i - 1, t, r, 2)
            for i, (t, r) in enumerate(zip(prompt, answer.prompt_logprobs, strict=True))
            if i
        ),
        *(
            (len(prompt) - 1 + i, t, r, 3)
            for i, (t, r) in enumerate(zip(ids, completion.logprobs, strict=True))
        ),
    ]
    for position, token, row, count in positions:
        assert row.entries[0].token_id == token
        assert len(row.entries) == 1 + count
        top = expected[position].topk(count)
        assert [e.token_id for e in row.entries[1:]] == top.indices.tolist()
        for entry in row.entries:
            assert entry.logprob == pytest.approx(
                float(expected[position, entry.token_id]), abs=1e-4
            )
            assert entry.token.decode("utf-8", "replace") == oracle.tokenizer.decode(
                [entry.token_id]
            )


def structured_cases() -> Iterator[tuple[str, StructuredOutput, Any]]:
    def is_json(text: str) -> bool:
        return isinstance(json.loads(text), dict | list)

    def fits_schema(text: str) -> bool:
        value = json.loads(text)
        return value["name"] in ("fox", "hen") and 1 <= value["legs"] <= 9 and len(value) == 3

    yield "schema", StructuredOutput(json_schema=json.dumps(SCHEMA)), fits_schema
    yield (
        "regex",
        StructuredOutput(regex=r"\d{3}-[a-f]+x"),
        lambda t: re.fullmatch(r"\d{3}-[a-f]+x", t),
    )
    yield (
        "grammar",
        StructuredOutput(grammar='root ::= "(" root ")" | "a"'),
        lambda t: re.fullmatch(r"\(*a\)*", t) and t.count("(") == t.count(")"),
    )
    options = ['yes "quoted"', "nein\n", "はい"]
    yield "choice", StructuredOutput(choice=Choice(options=options)), lambda t: t in options
    yield "json", StructuredOutput(json_object=True), is_json


@pytest.mark.parametrize(
    ("output", "fits"), [pytest.param(o, f, id=n) for n, o, f in structured_cases()]
)
def test_structured_output_fits(
    output: StructuredOutput, fits: Any, stub: InferenceServiceStub
) -> None:
    # A small model closes what it opens sooner with some encouragement.
    closing = stub.Tokenize(TokenizeRequest(text='"}])x')).token_ids
    complete = 0
    for seed in range(3):
        params = SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=200,
            structured_output=output,
            logit_bias=dict.fromkeys(closing, 6.0),
        )
        answer = stub.Generate(request_for(params, "Say it."), timeout=TIMEOUT_S)
        (completion,) = answer.completions
        if completion.finish_reason == FINISH_REASON_EOS:
            complete += 1
            assert fits(completion.text), completion.text
        else:
            assert completion.finish_reason == FINISH_REASON_LENGTH
    assert complete


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (StructuredOutput(regex="(unclosed"), "regex"),
        (StructuredOutput(json_schema='{"type": "no such type"}'), "json_schema"),
        (StructuredOutput(json_schema="{"), "json_schema"),
        (StructuredOutput(grammar="root ::= missing"), "grammar"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    output: StructuredOutput, field: str, stub: InferenceServiceStub
) -> None:
    request = request_for(SamplingParams(structured_output=output))
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(request, timeout=TIMEOUT_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"sampling.structured_output.{field}: " in error.value.details()
