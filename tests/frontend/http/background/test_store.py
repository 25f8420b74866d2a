from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.background import store as module
from frontend.http.background.store import ResponseStore
from shared.errors import UnavailableError
from tests.frontend.http.background.files import (
    CANCELLED,
    adopt,
    create,
    fill_disk,
    new_id,
    num_descriptors,
    opened,
    state,
)

NO_SPACE = r"(?i)no space left"
STOP = {"end": "stop"}


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_others_read_what_the_owner_appends(store: ResponseStore) -> None:
    owner = create(store, input=["question"])
    reader = opened(store)
    assert reader.id == new_id()
    assert reader.header == {"response": {"id": new_id()}, "input": ["question"]}
    owner.append([1])
    owner.append([2, 3])
    assert state(reader) == ([1, 2, 3], None)
    owner.finish(STOP)
    assert state(reader) == state(opened(store)) == state(owner) == ([1, 2, 3], STOP)


def test_only_this_user_may_read_the_files(store: ResponseStore, directory: Path) -> None:
    mask = os.umask(0)
    try:
        owner = create(store)
    finally:
        os.umask(mask)
    assert (mode(directory), mode(owner.path)) == (0o700, 0o600)
    owner.finish(STOP)
    assert mode(owner.path) == 0o400


def test_an_ended_response_can_be_read_without_permission_to_write(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def without_root(path: Path, flags: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError
        return open_file(path, flags)

    create(store).finish(STOP)
    monkeypatch.setattr(os, "open", without_root)
    found = opened(store)
    found.finish(CANCELLED)  # changes nothing
    assert state(found) == ([], STOP)


def test_clients_cannot_open_responses_of_others(store: ResponseStore) -> None:
    create(store, owner="acme")
    assert opened(store, owner="acme").id == new_id()
    assert store.open("web", new_id()) is None
    assert store.open("", new_id()) is None


@pytest.mark.parametrize(
    "text", ["", "resp_", "resp_1", "../x", f"../{new_id()}", f"{new_id()}\n", new_id().upper()]
)
def test_only_ids_are_looked_up(store: ResponseStore, text: str) -> None:
    create(store)
    assert store.open("", text) is None


def test_a_response_is_adopted_once_and_only_when_its_lock_is_free(store: ResponseStore) -> None:
    owner = create(store)
    owner.append([1])
    assert [*store.unfinished()] == []
    owner.close()
    adopted = adopt(store)
    assert adopted.tokens == [1]
    assert [*store.unfinished()] == []
    adopted.append([2])
    adopted.finish(STOP)
    adopted.close()
    assert [*store.unfinished()] == []
    assert state(opened(store)) == ([1, 2], STOP)


def test_an_owner_whose_response_is_cancelled_adds_nothing(store: ResponseStore) -> None:
    owner = create(store)
    owner.append([1])
    opened(store).finish(CANCELLED)
    owner.append([2])
    owner.finish(STOP)
    assert state(owner) == state(opened(store)) == ([1], CANCELLED)


def test_a_response_whose_end_was_not_marked_is_not_continued(store: ResponseStore) -> None:
    owner = create(store)
    owner.finish(STOP)
    owner.path.chmod(0o600)
    owner.close()
    assert [*store.unfinished()] == []
    assert mode(owner.path) == 0o400


LINES: Sequence[Sequence[int]] = ([1], [23, 456], [78], [], [9])


def test_a_file_may_be_cut_off_at_any_byte(store: ResponseStore) -> None:
    owner = create(store)
    size = owner.path.stat().st_size
    for line in LINES:
        owner.append(line)
    tokens = owner.tokens[:]
    owner.finish(STOP)
    owner.close()
    content = owner.path.read_bytes()
    for end in range(size, len(content)):
        owner.path.unlink()
        owner.path.write_bytes(content[:end])
        reader = opened(store)
        before = reader.tokens[:]
        assert before == tokens[: len(before)]
        adopted = adopt(store)
        adopted.append([1000])
        adopted.append([1001, 1002])
        adopted.finish({"end": "length"})
        wanted = ([*before, 1000, 1001, 1002], {"end": "length"})
        assert state(reader) == state(adopted) == state(opened(store)) == wanted
        for each in (reader, adopted):
            each.close()


def test_a_file_without_its_whole_request_is_not_a_response(
    store: ResponseStore, directory: Path
) -> None:
    owner = create(store)
    draft = owner.path.with_name(f".{owner.path.name}")
    owner.path.rename(draft)
    owner.close()
    assert store.open("", new_id()) is None
    assert [*store.unfinished()] == []


Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "read", "open", "die", "cut", "cancel"]), st.integers(0, 5)
    ),
    max_size=30,
)


@given(ACTIONS, st.booleans())
def test_all_see_one_growing_list_of_tokens(actions: list[Action], finishes: bool) -> None:
    """An owner appends, dies, perhaps in the middle of a line, and is replaced. Others read, and
    end the response."""
    with TemporaryDirectory() as directory:
        store = ResponseStore(directory)
        owner, numbers = create(store), iter(range(10, 1000))
        readers, seen = [opened(store)], list[list[int]]()
        for action, count in actions:
            if action == "append":
                owner.append([next(numbers) for _ in range(count)])
            elif action == "read":
                reader = readers[count % len(readers)]
                reader.refresh()
                seen.append(reader.tokens[:])
            elif action == "open":
                readers.append(opened(store))
            elif action == "cancel" and count == 0:
                opened(store).finish(CANCELLED)
            elif action in ("die", "cut"):
                if action == "cut":  # a line of which `count` bytes were written
                    with owner.path.open("ab") as file:
                        file.write(b"\n[10, 11]"[:count])
                owner.close()
                owner = next(store.unfinished(), None) or opened(store)
        if finishes:
            owner.finish(STOP)
        final = state(opened(store))
        assert all(state(reader) == final for reader in readers)
        assert all(tokens == final[0][: len(tokens)] for tokens in seen)
        assert final[0] == sorted({*final[0]})


def test_without_space_nothing_is_created(
    store: ResponseStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (0, 10):
        fill_disk(monkeypatch, directory, room)
        with pytest.raises(UnavailableError, match=NO_SPACE):
            create(store)
        assert not [*directory.iterdir()]


@pytest.mark.parametrize("room", range(20))
def test_tokens_that_do_not_fit_are_not_stored(
    store: ResponseStore, directory: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    owner, reader = create(store), opened(store)
    make_room = fill_disk(monkeypatch, directory, room)
    with pytest.raises(OSError, match=NO_SPACE):  # noqa: PT012
        for token in (10, 11, 12, 13, 14):
            owner.append([token])
    with pytest.raises(OSError, match=NO_SPACE):
        opened(store).finish(CANCELLED)
    reader.refresh()
    before = reader.tokens[:]
    make_room()
    owner.append([20])  # although a line was cut off
    owner.finish(STOP)
    assert state(reader) == state(opened(store)) == ([*before, 20], STOP)


def test_responses_are_adopted_on_a_full_disk_and_their_locks_do_not_leak(
    store: ResponseStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store).close()
    fill_disk(monkeypatch, directory, 0)
    before = num_descriptors()
    for _ in range(3):
        adopted = adopt(store)
        with pytest.raises(OSError, match=NO_SPACE):
            adopted.append([1])
        adopted.close()
    assert num_descriptors() == before


def test_the_oldest_ended_response_of_the_client_with_most_makes_room(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 4)
    for number, owner in enumerate(["web", "acme", "acme", "acme"]):
        created = create(store, number, owner)
        if number != 1:  # it runs
            created.finish(STOP)
        os.utime(created.path, (number, number))
    create(store, 4, "web")
    names = [(0, "web"), (1, "acme"), (2, "acme"), (3, "acme"), (4, "web")]
    left = [number for number, owner in names if store.open(owner, new_id(number))]
    assert left == [0, 1, 3, 4]


def test_running_responses_never_make_room(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 2)
    create(store, 0)
    create(store, 1)
    with pytest.raises(UnavailableError, match="2 responses are stored"):
        create(store, 2)
    assert store.open("", new_id(0))
    assert store.open("", new_id(1))


def test_all_files_together_are_limited(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES_BYTES", 1000)
    for number in range(2):
        create(store, number, input=300 * "x").finish(STOP)
        os.utime(opened(store, number).path, (number, number))
    create(store, 2, input=700 * "x")
    assert [number for number in range(3) if store.open("", new_id(number))] == [2]
    with pytest.raises(UnavailableError, match="1000 bytes"):
        create(store, 3, input=300 * "x")


def test_old_responses_are_deleted_and_no_other_file(store: ResponseStore, directory: Path) -> None:
    old, new = create(store, 0), create(store, 1)
    draft = old.path.with_name(f".{old.path.name}")
    foreign = directory / "notes.txt"
    (directory / "folder").mkdir()
    for path in (draft, foreign):
        path.touch()
    for path in (draft, foreign, old.path, directory / "folder"):
        os.utime(path, (1000, 1000))
    store.delete_older_than(2000)
    assert {*directory.iterdir()} == {new.path, foreign, directory / "folder"}


def test_a_deleted_response_has_ended_for_all(store: ResponseStore) -> None:
    owner, reader = create(store), opened(store)
    owner.append([1])
    reader.delete()
    reader.delete()  # again, as another process may
    assert store.open("", new_id()) is None
    assert [*store.unfinished()] == []
    owner.append([2])
    assert state(owner) == state(reader) == ([1], CANCELLED)
