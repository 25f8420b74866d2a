"""Files of blocks: what is read is what was saved, or it counts as missing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.other_user import OTHER_USER, needs_root
from worker_svc.tier import directory as directory_module
from worker_svc.tier.directory import BlockDirectory, Bytes

BLOCK_BYTES = 1000
FILE_BYTES = BLOCK_BYTES + 16


def name(number: int) -> bytes:
    return bytes([number]) * 16


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def opened(root: Path, key: str = "key", max_bytes: int = 100 * FILE_BYTES) -> BlockDirectory:
    directory = BlockDirectory(root, key, BLOCK_BYTES, max_bytes)
    directory.find()
    return directory


def loaded(directory: BlockDirectory, number: int) -> bool:
    """Whether a block is there; then it must have its content."""
    buffer = np.zeros(BLOCK_BYTES, np.uint8)
    is_there = directory.load(name(number), buffer)
    assert not is_there or (buffer == content(number)).all()
    return is_there


def file_of(root: Path, number: int) -> Path:
    (found,) = root.glob(f"*/{name(number).hex()}")
    return found


def test_blocks_outlive_the_process_in_the_order_of_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_MAX_WAIT_S", 0.0)
    directory = opened(tmp_path)
    for number in (1, 2, 3):
        directory.save(name(number), content(number))
        os.utime(file_of(tmp_path, number), (100 * number, 100 * number))
    assert loaded(directory, 1)
    with pytest.raises(BlockingIOError):  # another process
        opened(tmp_path)
    directory.close()
    again = BlockDirectory(tmp_path, "key", BLOCK_BYTES, 5 * FILE_BYTES)
    assert again.find() == [name(2), name(3), name(1)]
    assert again.capacity == 5
    assert all(loaded(again, number) for number in (1, 2, 3))
    again.erase([name(2), name(9)])
    assert not loaded(again, 2)
    again.close()
    for number in (1, 3):
        os.utime(file_of(tmp_path, number), (600 + number, 600 + number))
    assert opened(tmp_path).find() == [name(3), name(1)]  # at about the same time


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = Random(path.name).randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flipped,
    "cut off": lambda path: os.truncate(path, FILE_BYTES - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, FILE_BYTES + 1),
    "zeros": lambda path: path.write_bytes(bytes(FILE_BYTES)),
    "another block's": lambda path: path.write_bytes(file_of(path.parent.parent, 2).read_bytes()),
    "a link": lambda path: (path.rename(path.with_name("aside")), path.symlink_to("aside")),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_and_deleted(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    directory = opened(tmp_path)
    for number in (1, 2):
        directory.save(name(number), content(number))
    path = file_of(tmp_path, 1)
    damage(path)
    assert not loaded(directory, 1)
    assert not os.path.lexists(path)
    assert loaded(directory, 2)
    directory.save(name(1), content(1))
    assert loaded(directory, 1)


def test_any_flipped_bit_and_any_cut_is_a_miss(tmp_path: Path) -> None:
    rng, directory = Random(0), opened(tmp_path)
    for number in range(100):
        directory.save(name(number), content(number))
        path = file_of(tmp_path, number)
        if number % 2:
            os.truncate(path, rng.randrange(FILE_BYTES))
        else:
            with path.open("r+b") as file:
                file.seek(place := rng.randrange(FILE_BYTES))
                byte = file.read(1)[0] ^ (1 << rng.randrange(8))
                file.seek(place)
                file.write(bytes([byte]))
        assert not loaded(directory, number), number


def test_blocks_of_another_key_are_misses(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.save(name(1), content(1))
    directory.close()
    other = opened(tmp_path, "another key")
    assert not loaded(other, 1)
    # Not even if somebody moves the file.
    (folder,) = [each for each in tmp_path.iterdir() if not list(each.iterdir())]
    (folder / name(1).hex()).write_bytes(file_of(tmp_path, 1).read_bytes())
    assert not loaded(other, 1)


def test_only_this_user_can_read_and_write(tmp_path: Path) -> None:
    root = tmp_path / "made" / "here"
    directory = opened(root)
    directory.save(name(1), content(1))
    for path in (root.parent, root, file_of(root, 1).parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(root, 1).stat().st_mode) == 0o600
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        opened(root)


@needs_root
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError, match="belongs to user"):
        opened(tmp_path)


def test_files_that_are_not_blocks_are_deleted(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.save(name(1), content(1))
    directory.close()
    folder = file_of(tmp_path, 1).parent
    (folder / f"{name(2).hex()}.new").touch()  # a process died while it wrote
    (folder / "other").mkdir()
    assert opened(tmp_path).find() == [name(1)]
    assert sorted(each.name for each in folder.iterdir()) == [name(1).hex(), "other"]


def test_files_of_other_keys_make_room_the_oldest_first(tmp_path: Path) -> None:
    """All files together stay within the limit."""
    old = opened(tmp_path, "old")
    for number in range(4):
        old.save(name(number), content(number))
        os.utime(file_of(tmp_path, number), (number, number))
    old.close()
    directory = opened(tmp_path, max_bytes=5 * FILE_BYTES + 1)
    for number in (11, 12, 13):
        directory.save(name(number), content(number))
        assert len([*tmp_path.glob("*/*")]) <= 5
    directory.save(name(11), content(11))  # again: nothing more
    directory.close()
    old = opened(tmp_path, "old")
    assert [loaded(old, number) for number in range(4)] == [False, False, True, True]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, write = opened(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    directory.save(name(1), content(1))  # a part at a time
    assert loaded(directory, 1)

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        directory.save(name(2), content(2))
    assert not loaded(directory, 2)
    assert len([*tmp_path.glob("*/*")]) == 1
