"""Errors of structured output. Errors about a grammar carry messages for the client."""

from __future__ import annotations

from enum import IntEnum

from shared.sampling_params import GrammarKind

_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.JSON: "json_object",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


class GrammarError(Exception):
    """A grammar cannot be used, or does not allow a token. The message names the field."""

    def __init__(self, kind: GrammarKind, reason: str) -> None:
        super().__init__(f"sampling.structured_output.{_FIELDS[kind]}: {reason}")
        self.reason = reason


class GuiltyGrammarError(GrammarError):
    """A grammar exceeded the limits of its process, or crashed it, and would do so again."""


class GrammarsBusyError(Exception):
    """Too many grammars are in use or being compiled; nothing is wrong with this one."""


class VocabularyError(Exception):
    """The model's tokenizer cannot be used; the message names the file and the reason."""


class Death(IntEnum):
    """How a grammar's process ended. The host sends the value as a byte (`wire`)."""

    AT_LIMIT = 65
    CRASHED = 66
    KILLED = 67
    SILENT = 68

    @property
    def can_be_its_fault(self) -> bool:
        """Whether the grammar can be the cause."""
        return self in (Death.AT_LIMIT, Death.CRASHED)


_REASONS = {
    Death.AT_LIMIT: "needs more processor time or memory than it may have",
    Death.CRASHED: "makes the grammar library crash",
    Death.KILLED: "its process was killed",
    Death.SILENT: "its process did not answer",
}


class ProcessDiedError(Exception):
    """A grammar's process ended while it had work, or was killed because it did not answer."""

    def __init__(self, death: Death) -> None:
        super().__init__(_REASONS[death])
        self.death = death
