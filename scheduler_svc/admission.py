"""Which sequences are refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.sequence import FinishCause, Sequence
from scheduler_svc.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class Limits:
    """Of a step (`max_num_seqs`, `max_num_batched_tokens`; `max_num_prefill_tokens` of prompts
    beside decodes), of a sequence and of the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt and completion together, tokens
    max_waiting: int
    vocab_size: int
    max_num_prefill_tokens: int = 1024
    max_waiting_tokens: int = 1 << 20


def refusal(seq: Sequence, limits: Limits, waiting: WaitingQueue) -> tuple[FinishCause, str] | None:
    """Why a sequence cannot be accepted; None if it can."""
    if problem := _problem(seq, limits):
        return FinishCause.INVALID, problem
    if seq.resubmitted:
        return None  # it was in the queue, or beyond it, when the connection was lost
    if len(waiting) >= limits.max_waiting:
        return FinishCause.QUEUE_FULL, f"{len(waiting)} requests are waiting already"
    if waiting and waiting.num_tokens + seq.num_tokens > limits.max_waiting_tokens:
        return FinishCause.QUEUE_FULL, (
            f"requests of {waiting.num_tokens} tokens are waiting already, "
            f"with {seq.num_tokens} more they would exceed the limit of {limits.max_waiting_tokens}"
        )
    return None


def _problem(seq: Sequence, limits: Limits) -> str:
    if seq.num_prompt_tokens == 0:
        return "prompt: is empty"
    room = limits.max_model_len - seq.num_prompt_tokens
    if room < 1:
        return (
            f"prompt: {seq.num_prompt_tokens} tokens; the limit is {limits.max_model_len - 1}, "
            f"{limits.max_model_len} less one to generate"
        )
    if not 0 <= min(seq.tokens) <= max(seq.tokens) < limits.vocab_size:
        return f"prompt: token ids must be below {limits.vocab_size}"
    if seq.params.max_tokens <= 0:
        return "sampling.max_tokens: must be at least 1"
    if seq.params.max_tokens > room:
        return (
            f"sampling.max_tokens: {seq.params.max_tokens}; after a prompt of "
            f"{seq.num_prompt_tokens} tokens {room} fit, {limits.max_model_len} in all"
        )
    return ""
