"""Decides which sequences are rejected on arrival."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf, isfinite, isnan

from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import FinishCause, Sequence
from scheduler_svc.core.step import End
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.sampling_params import BOUNDS, MAX_ITEMS, NUMBERS, GrammarKind, Pooling, Range

_MAX_REQUEST = (1 << 64) - 1
_RANGES = {name: BOUNDS[name].engine for name in (*NUMBERS, "beam_width", "length_penalty")}
_GRAMMAR_KINDS = frozenset(GrammarKind)
# Limit on the tokens of all beams of a request. The step that ends the search outputs them all.
MAX_BEAM_TOKENS = 1 << 17
_MAX_LOGPROBS = BOUNDS["logprobs"].engine.high
MAX_BAD_WORDS = 2 * MAX_ITEMS["bad_words"]  # at the beginning of a text, and after a space


@dataclass(frozen=True)
class Limits:
    """Limits on a step, on a sequence and on the queue. `max_num_prefill_tokens` limits the prompt
    tokens of a step that also has decodes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt and completion together, tokens
    max_waiting: int
    vocab_size: int
    max_num_prefill_tokens: int = 1024
    max_waiting_tokens: int = 1 << 20

    def prefill_budget(self, num_decodes: int) -> int:
        """The prompt tokens that fit into a step with `num_decodes` decodes."""
        budget = self.max_num_batched_tokens - num_decodes
        return min(budget, self.max_num_prefill_tokens) if num_decodes else budget


def refusal(
    seq: Sequence,
    n: int,
    limits: Limits,
    waiting: WaitingQueue,
    budgets: Budgets,
) -> End | None:
    """The end of a sequence and the other n - 1 completions of its prompt if they must be rejected,
    else None. They count as one in the queue, where only the first completion waits."""
    problem = (
        _problem(seq, limits)
        or _problem_of_many(seq, n)
        or sampling_problem(seq.params, limits.vocab_size)
    )
    if problem:
        return End(FinishCause.INVALID, problem)
    if seq.request.resubmitted:
        return None  # it was waiting or running when the connection was lost
    if spent := budgets.refusal(seq.request.client, seq.request.arrival):
        limit, message, retry_after_s = spent
        return End(FinishCause.QUEUE_FULL, message, retry_after_s, limit=limit)
    full = _full(seq, limits, waiting)
    return End(FinishCause.QUEUE_FULL, full) if full else None


def _full(seq: Sequence, limits: Limits, waiting: WaitingQueue) -> str:
    """Names the limit of the queue that a sequence would exceed; empty if none. A client with
    nothing in the queue finds room, so that others cannot keep it out."""
    if not waiting.has_any_of(seq.request.client, seq.key.connection):
        return ""
    if len(waiting) >= limits.max_waiting:
        return f"{len(waiting)} requests are waiting; the limit is {limits.max_waiting}"
    if waiting.num_tokens + seq.num_tokens > limits.max_waiting_tokens:
        return (
            f"{waiting.num_tokens} tokens are waiting; {seq.num_tokens} more would exceed the "
            f"limit of {limits.max_waiting_tokens}"
        )
    return ""


def _problem(seq: Sequence, limits: Limits) -> str:
    if seq.num_prompt_tokens == 0:
        return "prompt: must not be empty"
    room = limits.max_model_len - seq.num_prompt_tokens
    if room < 1:
        return (
            f"prompt: {seq.num_prompt_tokens} tokens; the limit is {limits.max_model_len - 1}, "
            "so that one token can be generated"
        )
    if not _in_vocabulary(seq.tokens, limits.vocab_size):
        return f"prompt: token ids must be below {limits.vocab_size}"
    if seq.params.max_tokens <= 0:
        return "sampling.max_tokens: must be at least 1"
    if seq.params.max_tokens > room:
        return (
            f"sampling.max_tokens: {seq.params.max_tokens}; the limit is {room} after a prompt of "
            f"{seq.num_prompt_tokens} tokens"
        )
    if seq.request.deadline is not None and isnan(seq.request.deadline):
        return "timeout_s: must be a number"
    weight = seq.request.client.weight
    if not 0 < weight < inf:
        return f"client.weight: {weight}; must be finite and above 0"
    return ""


def _problem_of_many(seq: Sequence, n: int) -> str:
    if n not in BOUNDS["n"].engine:
        return _out_of(BOUNDS["n"].engine, "n", n)
    if n > 1 and seq.num_generated_tokens:
        return f"sampling.n: {n}; must be 1 when tokens are resumed"
    if n > 1 and seq.params.beam_width:
        return f"sampling.n: {n}; must be 1 with sampling.beam_width"
    if seq.params.beam_width and seq.num_generated_tokens:
        return f"sampling.beam_width: {seq.params.beam_width}; must be 0 when tokens are resumed"
    count = max(n, seq.params.beam_width)
    if seq.key.number + count - 1 > _MAX_REQUEST:
        return f"request: {seq.key.number} leaves no numbers for {count} completions"
    return ""


def sampling_problem(params: SamplingParams, vocab_size: int) -> str:
    """Names a sampling parameter that no worker can run, and its range; empty if none."""
    if problem := _beam_problem(params, vocab_size):
        return problem
    most = min(_MAX_LOGPROBS, vocab_size)
    for name, value, valid in (
        *((name, getattr(params, name), valid) for name, valid in _RANGES.items()),
        ("min_tokens", params.min_tokens, Range(0, params.max_tokens)),
        ("logprobs", params.logprobs or 0, Range(0, most)),
        ("prompt_logprobs", params.prompt_logprobs or 0, Range(0, most)),
    ):
        if value not in valid:
            return _out_of(valid, name, value)
    return _token_problem(params, vocab_size)


def _beam_problem(params: SamplingParams, vocab_size: int) -> str:
    """Names what makes a beam search impossible, or too slow within one step; empty if nothing."""
    if not params.beam_width:
        return ""
    beams, count = f"sampling.beam_width: {params.beam_width}", params.num_logprobs or 0
    if count > vocab_size:
        return f"{beams}; needs {count} candidates, but the vocabulary has {vocab_size} tokens"
    if count > _MAX_LOGPROBS:
        return (
            f"{beams} beams with {len(params.end_token_ids)} tokens that end them need "
            f"{count} candidates; the limit is {_MAX_LOGPROBS}"
        )
    if params.beam_width * params.max_tokens > MAX_BEAM_TOKENS:
        return (
            f"{beams} beams of up to {params.max_tokens} tokens, sampling.max_tokens or what fits "
            f"the model; the limit is {MAX_BEAM_TOKENS} tokens"
        )
    return f"{beams}; must be 0 with a grammar" if params.grammar else ""


def _token_problem(params: SamplingParams, vocab_size: int) -> str:
    if params.grammar and params.grammar.kind not in _GRAMMAR_KINDS:
        return f"sampling.grammar: kind {params.grammar.kind} is unknown"
    if len(params.bias_ids) != len(params.bias_values):
        return (
            f"sampling.logit_bias: {len(params.bias_values)} values for "
            f"{len(params.bias_ids)} token ids"
        )
    if len(set(params.bias_ids)) != len(params.bias_ids):
        return "sampling.logit_bias: a token id occurs twice"
    if not all(map(isfinite, params.bias_values)):
        return "sampling.logit_bias: values must be finite numbers"
    if len(params.bad_words) > MAX_BAD_WORDS or not all(params.bad_words):
        return f"sampling.bad_words: must be at most {MAX_BAD_WORDS}, of one token or more"
    answer_ids = (params.yes_id, params.no_id) if params.pooling is Pooling.SCORE else ()
    for name, ids in (
        ("pooling", answer_ids),
        ("logit_bias", params.bias_ids),
        *(("bad_words", word) for word in params.bad_words),
        # The workers receive these only to ban them before min_tokens.
        ("eos_token_ids", params.eos_token_ids if params.min_tokens else ()),
        ("stop_token_ids", params.stop_token_ids if params.min_tokens else ()),
    ):
        if not _in_vocabulary(ids, vocab_size):
            return f"sampling.{name}: token ids must be below {vocab_size}"
    return ""


def _in_vocabulary(ids: Collection[int], vocab_size: int) -> bool:
    return not ids or 0 <= min(ids) <= max(ids) < vocab_size


def _out_of(valid: Range, name: str, value: float) -> str:
    return f"sampling.{name}: {value}; must be {valid}"
