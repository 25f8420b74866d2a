"""A process's published state is believed if the process is this user's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pytest

from shared.process.kept import memory_file
from shared.process.owner import is_own
from shared.process.parent_state import STATE_NAME, read_parent_state
from shared.process.published_state import PublishedState, read_published_state
from tests.other_user import OTHER_USER, needs_root, process_of_another_user, running

SHOWING = "from shared.process.published_state import PublishedState"


@pytest.fixture
def name() -> str:
    """The name of a state that no other test publishes."""
    return f"test-{os.urandom(4).hex()}"


@needs_root
@pytest.mark.parametrize(
    "users",
    [
        (OTHER_USER, OTHER_USER, OTHER_USER),
        (OTHER_USER, 0, 0),  # as of a program with the set-user-ID bit
        (0, OTHER_USER, 0),
        (0, 0, OTHER_USER),
    ],
)
def test_no_process_with_another_user_is_own_or_shows_anything(users: tuple[int, ...]) -> None:
    show = "state = PublishedState('state'); state.show({'pid': 1})"
    with process_of_another_user({}, users, show, SHOWING) as process:
        assert not is_own(process.pid)
        assert read_published_state(process.pid, "state") is None


@needs_root
def test_a_state_that_another_user_has_published_is_not_read() -> None:
    """A program with the set-user-ID bit may keep the descriptors of the user who has started it,
    and become its owner's altogether."""
    show = (
        "os.seteuid(65534); state = PublishedState('state'); state.show({'pid': 1}); os.seteuid(0)"
    )
    with process_of_another_user({}, (0, 0, 0), show, SHOWING) as process:
        assert is_own(process.pid)
        assert read_published_state(process.pid, "state") is None


def test_a_process_of_this_user_is_own_while_it_runs() -> None:
    with running([sys.executable, "-c", "print(flush=True); input()"], {}) as process:
        assert is_own(process.pid)
        assert is_own(process.pid, os.getpid())
        assert not is_own(process.pid, process.pid)
    assert not is_own(process.pid)
    assert not is_own(0)


def test_a_state_is_read_up_to_its_size(name: str) -> None:
    state = PublishedState(name)
    shown = {"text": "x" * 60_000}
    state.show(shown)
    assert read_published_state(os.getpid(), name) == shown
    state.close()
    huge = memory_file(name)
    try:
        os.write(huge, json.dumps({"text": "x" * 70_000}).encode())
        assert read_published_state(os.getpid(), name) is None
    finally:
        os.close(huge)


@pytest.fixture
def parent_published() -> Iterator[PublishedState]:
    """This process's, as if it were a parent process."""
    state = PublishedState(STATE_NAME)
    yield state
    state.close()


def test_a_fork_is_believed_only_if_it_is_a_child(parent_published: PublishedState) -> None:
    def shown_fork(pid: int) -> int:
        parent_published.show({"pid": pid, "reason": "it crashed"})
        state = read_parent_state(os.getpid())
        assert state
        assert state.reason == "it crashed"
        return state.pid

    with running([sys.executable, "-c", "print(flush=True); input()"], {}) as child:
        assert shown_fork(child.pid) == child.pid
    assert shown_fork(child.pid) == 0  # it has ended
    assert shown_fork(os.getppid()) == 0  # it has another parent
    assert shown_fork(1) == 0
