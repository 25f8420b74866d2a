"""The events of a response, and the response as they leave it.

The same input gives the same events, with the same numbers, ids and texts. A stream is therefore
continued by feeding its tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.http.answers import named_event
from frontend.http.formats.parser import CallArguments, CallBegin, Content, Event, Reasoning

Json = dict[str, Any]


class ResponseEvents:
    """Builds a response.

    Args:
        response: the response before its first token; it is not changed.
    """

    def __init__(self, response: Json) -> None:
        self.response = response | {"output": []}
        self._id = str(response["id"]).partition("_")[2]
        self._number = 0  # of the next event
        self._item: Json = {}  # the last item, while it is open
        self._num_reasoning_tokens = 0
        self._logprobs: list[Json] = []  # of tokens whose text has not arrived
        self._events: list[bytes] = []  # since the last `take`

    def take(self, after: int = -1) -> list[bytes]:
        """Returns the events since the last call whose numbers are above `after`, as server-sent
        events."""
        events, self._events = self._events, []
        first = self._number - len(events)
        return events[max(0, after + 1 - first) :]

    def start(self) -> None:
        self._emit("response.created", response=self.response)
        self.response |= {"status": "in_progress"}
        self._emit("response.in_progress", response=self.response)

    def feed(self, events: Sequence[Event], num_tokens: int, logprobs: Sequence[Json] = ()) -> None:
        """Adds what tokens show.

        Args:
            num_tokens: the number of tokens, for statistics.
            logprobs: entries of the tokens; a text gets them.
        """
        self._logprobs += logprobs
        for event in events:
            match event:
                case Reasoning(text):
                    self._num_reasoning_tokens += num_tokens
                    num_tokens = 0
                    self._logprobs.clear()
                    self._add_text("reasoning", text)
                case Content(text):
                    self._add_text("message", text)
                case CallBegin(name):
                    self._logprobs.clear()
                    self._open("function_call", name=name)
                case CallArguments(text):
                    self._item["arguments"] += text
                    self._emit_of_item("response.function_call_arguments.delta", delta=text)
        if self._logprobs and self._item.get("type") == "message":
            self._add_text("message", "")

    def _add_text(self, kind: str, text: str) -> None:
        if self._item.get("type") != kind:
            self._open(kind)
        part = self._item["content"][0]
        part["text"] += text
        news: Json = {"delta": text}
        if kind == "message":
            part["logprobs"] += self._logprobs
            news["logprobs"], self._logprobs = self._logprobs, []
        self._emit_of_item(f"response.{part['type']}.delta", content_index=0, **news)

    def _open(self, kind: str, name: str = "") -> None:
        """Begins an item of the output."""
        self._close("completed")
        number = len(self.response["output"])
        item: Json = {"type": kind, "status": "in_progress"}
        part: Json = {}
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item |= {"id": f"rs_{self._id}{number}", "summary": [], "content": []}
        elif kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"id": f"msg_{self._id}{number}", "role": "assistant", "content": []}
        else:
            item |= {
                "id": f"fc_{self._id}{number}",
                "call_id": f"call_{self._id}{number}",
                "name": name,
                "arguments": "",
            }
        self.response["output"].append(item)
        self._item = item
        self._emit("response.output_item.added", output_index=number, item=item)
        if part:
            item["content"].append(part)
            self._emit_of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> None:
        """Ends the open item, if there is one."""
        item = self._item
        if not item:
            return
        item["status"] = status
        if item["type"] == "function_call":
            self._emit_of_item(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            text = {key: part[key] for key in ("text", "logprobs") if key in part}
            self._emit_of_item(f"response.{part['type']}.done", content_index=0, **text)
            self._emit_of_item("response.content_part.done", content_index=0, part=part)
        self._emit(
            "response.output_item.done",
            output_index=len(self.response["output"]) - 1,
            item=item,
        )
        self._item = {}

    def end(self, reason: str, usage: Json | None, error: Json | None = None) -> None:
        """Ends the response.

        Args:
            reason: stop, length, cancelled or failed.
            usage: OpenAI's usage of a chat.
            error: of a response that failed.
        """
        status, event = _ENDS[reason]
        self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "error": error}
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        if usage is not None:
            self.response["usage"] = self.usage(usage)
        self._emit(event, response=self.response)

    def usage(self, usage: Json) -> Json:
        details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _emit_of_item(self, kind: str, **values: Any) -> None:
        number = len(self.response["output"]) - 1
        self._emit(kind, item_id=self._item["id"], output_index=number, **values)

    def _emit(self, kind: str, **values: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        self._events.append(named_event(kind, event))


# Status and last event, by the reason of the end.
_ENDS = {
    "stop": ("completed", "response.completed"),
    "length": ("incomplete", "response.incomplete"),
    "cancelled": ("cancelled", "response.incomplete"),
    "failed": ("failed", "response.failed"),
}
