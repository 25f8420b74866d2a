"""Records the events that clients received of a background response, and finds contradictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.faults.background_stack import Event, is_last, parsed


@dataclass
class Ledger:
    """The events of one response, from all connections that read it."""

    name: str
    violations: list[str]
    events: list[bytes] = field(default_factory=list)
    num_repeated: int = 0  # events that were received again

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and is_last(self.events[-1])

    def connection(self, after: int) -> Connection:
        """Begins to read the events above `after`."""
        return Connection(self, after + 1)

    def note(self, problem: str) -> None:
        self.violations.append(f"{self.name}: {problem}")

    def check_final(self, response: Any, max_tokens: int) -> None:
        """Compares the response, as it is retrieved after its end, with its events."""
        found = [parsed(event) for event in self.events]
        if found[-1]["response"] != response:
            self.note("the last event has another response than the one that is retrieved")
        deltas = [each["delta"] for each in found if each["type"] == "response.output_text.delta"]
        if "".join(deltas) != text_of(response):
            self.note("the joined deltas are not the text of the response")
        if response["status"] not in ("completed", "incomplete"):
            self.note(f"status {response['status']}: {response['error']}")
            return
        count = response["usage"]["output_tokens"]
        if count > max_tokens or (response["status"] == "incomplete" and count != max_tokens):
            self.note(f"{count} of {max_tokens} tokens, {response['status']}")


@dataclass
class Connection:
    ledger: Ledger
    next_number: int

    def take(self, event: Event) -> None:
        number, text = event
        ledger, wanted = self.ledger, self.next_number
        if number != wanted:
            lost_or_double = "lost" if number > wanted else "doubled"
            ledger.note(f"event {number} instead of {wanted}: {lost_or_double}")
        self.next_number = number + 1
        if number < len(ledger.events):
            ledger.num_repeated += 1
            if ledger.events[number] != text:
                ledger.note(f"event {number} changed from {ledger.events[number]!r} to {text!r}")
        elif number == len(ledger.events):
            if ledger.has_ended:
                ledger.note(f"event {number} after the end")
            ledger.events.append(text)

    def end(self) -> None:
        """Notes a stream that ended without an error before the response did."""
        if not self.ledger.has_ended or self.next_number < len(self.ledger.events):
            self.ledger.note(f"the stream ended before event {self.next_number}")


def text_of(response: Any) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"])
