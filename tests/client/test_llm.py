"""The blocking client over real gRPC, against a server whose tokens are known."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from typing import Any

import grpc
import pytest

from nano_vllm_grpc import (
    LLM,
    DeadlineError,
    InvalidRequestError,
    Prompt,
    QueueFullError,
    SamplingParams,
    StructuredOutput,
    UnavailableError,
)
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import QueueFullError as ServerQueueFullError
from tests.client.fake_server import ENDLESS_SEED, FakeServer, FakeService


def texts(llm: LLM, prompts: Any, params: SamplingParams | None = None) -> list[str]:
    return [c["text"] for c in llm.generate(prompts, params, use_tqdm=False)]


def sent_fields(service: FakeService) -> set[str]:
    """The sampling fields sent, without the seed that the client chooses."""
    names = {field.name for field, _ in service.requests[0].sampling.ListFields()}
    return names - {"seed"}


def test_completions_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    # Longest first: completions arrive in a different order from the requests.
    prompts = [chr(ord("a") + i) for i in range(20)]
    params = [SamplingParams(max_tokens=100 - 5 * i) for i in range(20)]

    results = llm.generate(prompts, params, use_tqdm=False)

    assert [c["text"] for c in results] == [chr(ord("b") + i) * (100 - 5 * i) for i in range(20)]
    assert results[3]["token_ids"] == [ord("e")] * 85
    assert results[3]["finish_reason"] == "length"
    assert results[3]["usage"] == {
        "prompt_tokens": 1,
        "cached_prompt_tokens": 0,
        "completion_tokens": 85,
    }
    json.dumps(results)


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["bcb"]),
        ([97, 98], ["bcb"]),
        (CHAT, ["bcd"]),
        (["ab", "x"], ["bcb", "yyy"]),
        ([[97, 98], [120]], ["bcb", "yyy"]),
        ([CHAT, "x", [97]], ["bcd", "yyy", "bbb"]),
        ([], []),
    ],
)
def test_prompts_are_texts_ids_chats_or_lists_of_them(
    llm: LLM, prompts: object, expected: list[str]
) -> None:
    assert texts(llm, prompts, SamplingParams(max_tokens=3)) == expected


def user(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", **fields}]


@pytest.mark.parametrize(
    ("prompt", "structured", "message"),
    [
        ([-1], None, ""),
        ([1 << 40], None, ""),
        ("\ud800", None, ""),
        (user(text="a"), None, ""),
        (user(tool_calls=[{"type": "custom"}]), None, "type is 'custom'; must be 'function'"),
        (user(tool_calls=[{"function": {"arguments": print}}]), None, "not JSON serializable"),
        ("a", StructuredOutput(), "structured_output: nothing given; give one"),
        ("a", StructuredOutput(regex="a", json_object=True), "regex and json_object given"),
        ("a", StructuredOutput(json_schema={"a": print}), "not JSON serializable"),
    ],
)
def test_invalid_values_are_not_sent(
    llm: LLM, service: FakeService, prompt: Any, structured: StructuredOutput, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be sent: .*{message}"):
        llm.generate(prompt, SamplingParams(structured_output=structured), use_tqdm=False)
    assert service.requests == []


def test_without_sampling_params_the_server_decides(llm: LLM, service: FakeService) -> None:
    assert texts(llm, "a") == ["b" * 8]
    assert sent_fields(service) == set()


def test_zero_is_sent_but_none_is_not(llm: LLM, service: FakeService) -> None:
    llm.generate(
        "a",
        SamplingParams(temperature=0, ignore_eos=False, stop="END", logit_bias={3: -1.0}),
        use_tqdm=False,
    )
    sent = service.requests[0].sampling
    assert sent_fields(service) == {"temperature", "ignore_eos", "stop", "logit_bias"}
    assert list(sent.stop) == ["END"]
    assert dict(sent.logit_bias) == {3: -1.0}


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (
            StructuredOutput(json_schema={"b": 1, "a": [None]}),
            pb.StructuredOutput(json_schema='{"b": 1, "a": [null]}'),
        ),
        (StructuredOutput(json_schema="{}"), pb.StructuredOutput(json_schema="{}")),
        (StructuredOutput(regex=""), pb.StructuredOutput(regex="")),
        (StructuredOutput(grammar="root ::="), pb.StructuredOutput(grammar="root ::=")),
        (
            StructuredOutput(choice=["a", "b"]),
            pb.StructuredOutput(choice=pb.Choice(options=["a", "b"])),
        ),
        (StructuredOutput(json_object=True), pb.StructuredOutput(json_object=True)),
    ],
)
def test_structured_output_is_sent(
    llm: LLM, service: FakeService, wanted: StructuredOutput, sent: pb.StructuredOutput
) -> None:
    llm.generate("a", SamplingParams(structured_output=wanted), use_tqdm=False)
    assert sent_fields(service) == {"structured_output"}
    assert service.requests[0].sampling.structured_output == sent


def test_n_completions_of_each_prompt_in_order(llm: LLM) -> None:
    results = llm.generate(["a", "x"], SamplingParams(n=2, max_tokens=3), use_tqdm=False)
    assert [(c["text"], c["index"]) for c in results] == [
        ("bbb", 0),
        ("ccc", 1),
        ("yyy", 0),
        ("zzz", 1),
    ]
    for completion in results:
        assert completion["usage"] == {
            "prompt_tokens": 1,
            "cached_prompt_tokens": 0,
            "completion_tokens": 3,
        }
        assert completion["timings"]["total_s"] == 0.5
        assert completion["finish_reason"] == "length"


def test_beams_have_scores(llm: LLM) -> None:
    params = SamplingParams(beam_width=3, length_penalty=2, max_tokens=2)
    results = llm.generate("a", params, use_tqdm=False)
    assert [(c["text"], c["score"]) for c in results] == [("bb", -0.5), ("cc", -1.5), ("dd", -2.5)]


def test_logprobs_are_dicts_with_the_chosen_token_first(llm: LLM, service: FakeService) -> None:
    service.tokens_per_chunk = 2
    params = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=3, n=2)
    first, second = llm.generate("abc", params, use_tqdm=False)
    assert [list(row.items()) for row in first["logprobs"]] == [
        [(token, -0.5), (0, -1), (1, -2)] for token in b"bcd"
    ]
    assert [next(iter(row)) for row in second["logprobs"]] == list(b"cde")
    assert first["prompt_logprobs"] == [{}, {98: -0.5, 0: -1}, {99: -0.5, 0: -1}]
    assert second["prompt_logprobs"] == first["prompt_logprobs"]
    chunks = list(llm.stream("abc", params))
    assert chunks[0].prompt_logprobs == first["prompt_logprobs"]
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])


def test_resuming_returns_the_rest(llm: LLM, service: FakeService) -> None:
    params = SamplingParams(max_tokens=5)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    (rest,) = llm.generate("abc", params, use_tqdm=False, resume_token_ids=whole["token_ids"][:2])
    assert rest["token_ids"] == whole["token_ids"][2:]
    assert rest["usage"] == whole["usage"]
    assert list(service.requests[1].resume_token_ids) == whole["token_ids"][:2]
    chunks = list(llm.stream("abc", params, resume_token_ids=whole["token_ids"][:2]))
    assert "".join(chunk.text for chunk in chunks) == rest["text"]
    assert chunks[0].token_offset == 2

    both = llm.generate(["a", "x"], params, use_tqdm=False, resume_token_ids=[[], [121]])
    assert [c["text"] for c in both] == ["bbbbb", "yyyy"]
    with pytest.raises(ValueError, match="1 resume_token_ids for 2 prompts"):
        llm.generate(["a", "x"], params, resume_token_ids=[121])
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_requests_are_open_together_up_to_max_in_flight(
    server: FakeServer, service: FakeService
) -> None:
    service.start_together = 200
    with LLM(server.address, max_in_flight=200) as llm:
        results = texts(llm, ["a"] * 500)
    assert results == ["b" * 8] * 500
    assert service.max_in_flight == 200


def test_progress_bar_shows_prefill_and_decode_rates(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[Prompt] = ["ab", [97] * 5, CHAT]
    llm.generate(prompts, SamplingParams(max_tokens=20))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "prefill" in shown
    assert "decode 0 tok/s" not in shown.rsplit("\r", 1)[-1]
    llm.generate("a", use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_joined_chunks_equal_the_completion(llm: LLM, service: FakeService) -> None:
    service.tokens_per_chunk = 3
    params = SamplingParams(max_tokens=10)
    chunks = list(llm.stream("abc", params))
    whole = llm.generate("abc", params, use_tqdm=False)[0]
    assert "".join(c.text for c in chunks) == whole["text"]
    assert [t for c in chunks for t in c.token_ids] == whole["token_ids"]
    assert [c.token_offset for c in chunks] == [0, 3, 6, 9]
    assert [c.finish_reason for c in chunks] == [None, None, None, "length"]
    assert chunks[-1].usage == whole["usage"]


def test_closing_a_stream_cancels_the_request(llm: LLM, service: FakeService) -> None:
    stream = llm.stream("a", SamplingParams(seed=ENDLESS_SEED))
    assert next(stream).text == "b"
    assert not service.cancelled.is_set()
    stream.close()
    assert service.cancelled.wait(60)


def test_closing_the_client_cancels_open_requests(server: FakeServer, service: FakeService) -> None:
    llm = LLM(server.address)
    next(llm.stream("a", SamplingParams(seed=ENDLESS_SEED)))
    llm.close()
    assert service.cancelled.wait(60)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_a_client_that_is_dropped_leaves_no_thread(server: FakeServer) -> None:
    before = threading.active_count()
    llm = LLM(server.address)
    llm.generate("a", use_tqdm=False)
    assert threading.active_count() > before
    del llm
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "llm-client"]


def test_an_invalid_prompt_cancels_the_other_requests(llm: LLM, service: FakeService) -> None:
    service.start_together = 2
    params = [SamplingParams(seed=ENDLESS_SEED), SamplingParams()]
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", ""], params, use_tqdm=False)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.violations == (("prompt", "is empty; the limit is 1 token or more"),)
    assert str(caught.value).startswith("INVALID_ARGUMENT: prompt: is empty")
    assert caught.value.__suppress_context__
    assert service.cancelled.wait(60)


def test_a_request_to_a_full_server_is_sent_again(llm: LLM, service: FakeService) -> None:
    service.refusals.extend(ServerQueueFullError("full", 0.05) for _ in range(3))
    assert texts(llm, ["a", "c"], SamplingParams(max_tokens=2)) == ["bb", "dd"]
    assert len(service.requests) == 5


def test_a_request_to_a_full_server_is_not_sent_for_ever(
    server: FakeServer, service: FakeService
) -> None:
    service.refusals.extend(ServerQueueFullError("full", 0.01) for _ in range(100))
    with (
        LLM(server.address, max_retry_wait_s=0.05) as llm,
        pytest.raises(QueueFullError, match="full") as caught,
    ):
        llm.generate("a", use_tqdm=False)
    assert caught.value.retry_after_s == 0.01
    assert 1 < len(service.requests) <= 6


def test_a_deadline_ends_the_request(llm: LLM, service: FakeService) -> None:
    endless, timeout_s = SamplingParams(seed=ENDLESS_SEED), 0.2
    while not service.requests:  # until one has been in time
        with pytest.raises(DeadlineError):
            llm.generate("a", endless, use_tqdm=False, timeout_s=timeout_s)
        timeout_s *= 2
    assert service.cancelled.wait(60)


def test_the_error_of_an_absent_server_names_its_address() -> None:
    with (
        LLM("127.0.0.1:1", max_retry_wait_s=0) as llm,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        llm.get_model()


def test_tokenize_detokenize_and_get_model(llm: LLM) -> None:
    assert llm.tokenize("ab") == [97, 98]
    assert llm.tokenize([{"role": "user", "content": "xy"}]) == [120, 121]
    assert llm.detokenize([97, 98]) == "ab"
    model = llm.get_model()
    assert (model.model, model.eos_token_ids, model.capacity.block_size) == ("fake", [0], 16)
    assert model.default_sampling == SamplingParams(temperature=0.0, max_tokens=8)


def test_either_an_address_or_a_model_is_required() -> None:
    with pytest.raises(TypeError, match="give the address"):
        LLM()
    with pytest.raises(TypeError, match="private"):
        LLM("127.0.0.1:1", tp=2)


def test_importing_the_client_imports_nothing_heavy() -> None:
    script = (
        "import sys, nano_vllm_grpc;"
        "print(*{'torch', 'transformers', 'numpy', 'pydantic', 'structlog'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
