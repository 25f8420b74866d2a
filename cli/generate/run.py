"""Generates completions for the requests in a file, many at a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli.errors import CommandError
from cli.generate.requests import LineError, parse_defaults, parse_line
from cli.generate.results import Results
from nano_vllm_grpc import (
    AsyncLLM,
    Completion,
    LLMError,
    UnauthenticatedError,
    UnavailableError,
)

# These end the batch, because all other lines would fail, too.
_FATAL = (UnauthenticatedError, UnavailableError)
_IF_SET = ("stop_reason", "logprobs", "prompt_logprobs", "score")


@dataclass(frozen=True)
class Options:
    address: str
    concurrency: int
    params: str  # JSON: defaults for sampling parameters
    token_ids: bool  # whether to write token ids, too


def generate_file(requests: Path, output: Path, options: Options) -> int:
    """Writes a line to `output` for each line of `requests` that has none yet. Returns 1 if any
    request failed.

    Raises:
        CommandError: a file or an option cannot be used, or the server cannot be reached.
    """
    try:
        defaults = parse_defaults(options.params)
        with requests.open("rb") as file:
            total = sum(1 for line in file if line.strip())
        if output.exists() and output.samefile(requests):
            raise CommandError(f"{output}: is also the input")
    except LineError as error:
        raise CommandError(f"--params: {error}") from error
    except OSError as error:
        raise CommandError(f"{requests}: {error.strerror}") from error
    # disable=None: no bar unless stderr is a terminal.
    bar = tqdm(total=total, desc="Generating", unit="req", disable=None)
    with Results(output) as results:
        batch = _Batch(results, options, defaults, bar)
        try:
            asyncio.run(batch.run(requests))
        except ExceptionGroup as group:
            raise _reason(group.exceptions[0], output) from group
        finally:
            bar.close()
            print(batch.summary(total), file=sys.stderr)
    return 1 if batch.failed else 0


class _Batch:
    """A run over the lines, which all its tasks share."""

    def __init__(
        self, results: Results, options: Options, defaults: Mapping[str, Any], bar: tqdm[Any]
    ) -> None:
        self.failed = 0
        self._done = self._earlier = self._tokens = 0
        self._results = results
        self._options = options
        self._defaults = defaults
        self._bar = bar
        self._numbers: dict[str | int, int] = {}  # line numbers by id

    async def run(self, requests: Path) -> None:
        with requests.open("rb") as file:
            lines = ((n, line) for n, line in enumerate(file, start=1) if line.strip())
            async with AsyncLLM(self._options.address) as llm, asyncio.TaskGroup() as tasks:
                for _ in range(self._options.concurrency):
                    tasks.create_task(self._work(llm, lines))

    def summary(self, total: int) -> str:
        words = f"{self._done} of {total} requests are done, {self._earlier} of them earlier"
        if self.failed:
            words += f"; {self.failed} failed, see {self._results.failures_path}"
        if self._done + self.failed < total:
            words += "; run the same command to continue"
        return words

    async def _work(self, llm: AsyncLLM, lines: Iterator[tuple[int, bytes]]) -> None:
        for number, text in lines:
            line_id: str | int = number
            try:
                line = parse_line(text, number)
                line_id = line.id
                if (first := self._numbers.setdefault(line_id, number)) != number:
                    raise LineError(f"id: {line_id!r} is also the id of line {first}")
                if line_id in self._results.done:
                    self._earlier += 1
                else:
                    prompt, params = line.request(self._defaults)
                    completions = await llm.generate([prompt], params, use_tqdm=False)
                    self._results.add(line_id, self._record(completions))
                self._done += 1
            except _FATAL:
                raise
            except (LineError, LLMError) as error:
                self.failed += 1
                self._results.fail(line_id, number, str(error))
            self._bar.update()

    def _record(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the fields of a completion, or a list `completions` if there are several."""
        self._tokens += sum(len(each["token_ids"]) for each in completions)
        self._bar.set_postfix_str(f"{self._tokens} tokens", refresh=False)
        shown = [self._fields(each) for each in completions]
        return {"completions": shown} if len(shown) > 1 else shown[0]

    def _fields(self, completion: Completion) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": completion["text"]}
        if self._options.token_ids:
            fields["token_ids"] = completion["token_ids"]
        fields |= {"finish_reason": completion["finish_reason"], "usage": completion["usage"]}
        return fields | {k: v for k, v in completion.items() if k in _IF_SET and v}


def _reason(error: Exception, output: Path) -> Exception:
    """Turns an error that users can fix into a CommandError."""
    if isinstance(error, _FATAL):
        return CommandError(f"the server does not accept requests: {error}")
    return CommandError(f"{output}: {error.strerror}") if isinstance(error, OSError) else error
