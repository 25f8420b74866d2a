"""`python -m nano_vllm_grpc.chat` holds a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import closing
from typing import TextIO

from nano_vllm_grpc.errors import LLMError, UnavailableError
from nano_vllm_grpc.llm import LLM
from nano_vllm_grpc.types import Message, SamplingParams

HELP = """\
/reset   forget the conversation
/help    this list
/exit    leave (also Ctrl-D)
Ctrl-C   stop the answer
"""

ReadLine = Callable[[], str]


class Chat:
    """A conversation that keeps as much of its history as the model can take.

    Args:
        system: the system prompt; empty for none.
        out: where answers and notices go.

    Raises:
        LLMError: no server is ready.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str, out: TextIO) -> None:
        self._llm = llm
        self._params = params
        self._out = out
        self.model = llm.get_model()
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    def reset(self) -> None:
        self._turns.clear()
        self._notice("the conversation is forgotten")

    def ask(self, text: str) -> None:
        """Streams the answer. Ctrl-C or an error stops it. A partial answer stays in the history,
        but a question without any answer does not."""
        self._turns.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            self._drop_oldest()
            self._stream_answer(answer)
        except KeyboardInterrupt:
            self._notice("stopped")
        except LLMError as error:
            self._notice(str(error))
        if answer:
            self._turns.append({"role": "assistant", "content": "".join(answer)})
        else:
            self._turns.pop()

    def _stream_answer(self, answer: list[str]) -> None:
        """Streams the answer and appends its pieces to `answer` as they arrive."""
        tokens = at_first = 0
        start = first = last = time.perf_counter()
        try:
            with closing(self._llm.stream([*self._system, *self._turns], self._params)) as stream:
                for chunk in stream:
                    last = time.perf_counter()
                    if not tokens:
                        first, at_first = last, len(chunk.token_ids)
                    tokens += len(chunk.token_ids)
                    answer.append(chunk.text)
                    self._write(_without_controls(chunk.text))
        finally:
            self._write("\n")
            if tokens:
                rate = (tokens - at_first) / (last - first) if last > first else 0.0
                self._notice(
                    f"{tokens} tokens, {rate:.1f} tokens/s, first token {first - start:.2f} s"
                )

    def _drop_oldest(self) -> None:
        """Drops the oldest questions and answers until the rest leaves room for an answer."""
        limit = self.model.max_model_len
        room = self._params.max_tokens or limit // 4
        dropped = 0
        while len(self._turns) > 1:
            if len(self._llm.tokenize([*self._system, *self._turns])) + room <= limit:
                break
            del self._turns[:2]
            dropped += 1
        if dropped:
            self._notice(f"the conversation got too long; dropped the first {dropped} exchange(s)")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _notice(self, text: str) -> None:
        self._write(f"\x1b[2m[{text}]\x1b[0m\n" if self._out.isatty() else f"[{text}]\n")


def _without_controls(text: str) -> str:
    """Removes control characters, so that no model sends escape sequences to the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def converse(chat: Chat, read_line: ReadLine, out: TextIO) -> None:
    """Reads and answers lines until /exit or the end of input."""
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            continue  # Ctrl-C at the prompt discards the line
        except EOFError:
            return
        match line:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                chat.reset()
            case "/help":
                out.write(HELP)
            case _ if line.startswith("/"):
                out.write(f"{line.split()[0]}: no such command; /help lists them\n")
            case _:
                chat.ask(line)


def line_reader() -> ReadLine:
    """Returns a reader of lines, which has line editing and history on a terminal."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    return session.prompt


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m nano_vllm_grpc.chat", description=__doc__)
    parser.add_argument(
        "--address", default="127.0.0.1:50051", help="address of a frontend, %(default)s"
    )
    parser.add_argument("--system", default="", help="system prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument(
        "--max-tokens", type=int, help="tokens of an answer; default: what fits the model"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="may be given more than once")
    options = parser.parse_args(args)
    params = SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop=options.stop,
    )
    return hold_conversation(options.address, params, options.system)


def hold_conversation(address: str, params: SamplingParams, system: str) -> int:
    """Talks with the model at `address` on this terminal; returns the exit status."""
    # The parent process may have set SIGINT to be ignored, as shells do for background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LLM(address) as llm:
            chat = Chat(llm, params, system, sys.stdout)
            print(f"{chat.model.model} at {address}; /help lists the commands", flush=True)
            converse(chat, line_reader(), sys.stdout)
    except UnavailableError as error:
        print(f"no server is ready ({error.message}): run make up first", file=sys.stderr)
        return 1
    except LLMError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
