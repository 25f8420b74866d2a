"""Where a worker gets the library of the CPU kernels, and the threads that run them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.damage import cut, damages
from tests.worker_svc.untrusted import untrusted
from worker_svc.errors import StartError
from worker_svc.kernels.cpu import build, library
from worker_svc.kernels.cpu_features import num_cores

COMPILES = ["compiling the CPU kernels", "compiled the CPU kernels"]
UNUSABLE = "compiled CPU kernels cannot be used"
NOT_KEPT = "compiled CPU kernels are not kept; each start compiles again"

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders for libraries, empty: that of the checkout or image, and the user's."""
    (tmp_path / "sources").mkdir()
    text = 'extern "C" { void* nano_team_create(int) { return 0; } int answer() { return 42; } }'
    (tmp_path / "sources" / "library.cpp").write_text(text)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "prebuilt", tmp_path / "cache" / "nano-vllm-grpc" / "kernels"


def start() -> list[str]:
    """Loads the library as a new process would -> what was logged."""
    with capture_logs() as logs:
        assert library.library.__wrapped__().answer() == 42
    return [each["event"] for each in logs]


@needs_compiler
def test_the_first_start_compiles_and_later_ones_load(places: tuple[Path, Path]) -> None:
    _, cache = places
    assert start() == COMPILES
    assert build.find(cache, build.choose_variant())
    assert start() == []


@needs_compiler
def test_forks_have_the_library_that_was_compiled_before_them(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    library.library.cache_clear()
    library.preload()
    assert library.library.cache_info().currsize == 0  # it compiles nothing
    start()
    library.preload()
    (tmp_path / "sources" / "library.cpp").write_text("an update")
    try:
        assert library.library().answer() == 42
    finally:
        library.library.cache_clear()


@needs_compiler
def test_what_setup_has_compiled_is_loaded_without_a_compiler(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt, cache = places
    build.build(prebuilt, [build.choose_variant()])
    monkeypatch.setenv("CXX", "no-compiler")
    assert start() == []
    assert not cache.exists()


def test_no_library_and_no_compiler(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(StartError, match=r"no C\+\+ compiler \(no-compiler\); install"):
        start()


@needs_compiler
@untrusted
@pytest.mark.parametrize("whole_folder", [False, True])
def test_what_others_may_have_written_is_not_loaded(
    places: tuple[Path, Path], change: Callable[[Path], None], whole_folder: bool
) -> None:
    prebuilt, _ = places
    (path,) = build.build(prebuilt, [build.choose_variant()])
    kind_changes = change.__name__ == "of_another_kind"
    change(path.parent if whole_folder else path)
    refused = [] if whole_folder and kind_changes else [UNUSABLE]
    assert start() == [*refused, *COMPILES]
    assert start() == refused


@needs_compiler
@untrusted
def test_a_cache_that_others_may_have_written_is_not_used(
    places: tuple[Path, Path], change: Callable[[Path], None]
) -> None:
    _, cache = places
    start()
    change(cache / build.digest())
    refused = [] if change.__name__ == "of_another_kind" else [UNUSABLE]
    assert start() == [*refused, COMPILES[0], NOT_KEPT, *COMPILES]


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of root")
def test_what_root_has_compiled_is_loaded_by_other_users(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt, _ = places
    build.build(prebuilt, [build.choose_variant()])
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert start() == []


@needs_compiler
@damages
@pytest.mark.parametrize("prebuilt", [True, False])
def test_a_damaged_library_is_compiled_again_where_it_was(
    places: tuple[Path, Path], damage: Callable[[Path], None], prebuilt: bool
) -> None:
    base = places[not prebuilt]
    (path,) = build.build(base, [build.choose_variant()])
    right = path.read_bytes()
    damage(path)
    library.library.cache_clear()
    library.preload()  # does not run it
    assert library.library.cache_info().currsize == 0
    assert start() == [UNUSABLE, *COMPILES]
    assert path.read_bytes() == right
    assert start() == []
    assert not places[prebuilt].exists()


@needs_compiler
def test_a_damaged_library_that_cannot_be_replaced_is_not_loaded(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in an image belong to another user."""
    prebuilt, cache = places
    start()  # the cache has it, too
    (path,) = build.build(prebuilt, [build.choose_variant()])
    cut(path)

    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert start() == [UNUSABLE]
    assert list(cache.iterdir())


@needs_compiler
def test_what_was_checked_is_loaded_even_if_its_path_is_replaced(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other,) = build.build(tmp_path / "other", [build.choose_variant()])
    source = tmp_path / "sources" / "library.cpp"
    source.write_text(source.read_text().replace("42", "13"))
    (path,) = build.build(places[0], [build.choose_variant()])
    opened = build.opened

    @contextmanager
    def replaced(path: Path) -> Iterator[int]:
        with opened(path) as number:
            other.replace(path)
            yield number

    monkeypatch.setattr(library, "opened", replaced)
    assert library._load(path).answer() == 13


@needs_compiler
def test_each_library_is_loaded_as_itself(places: tuple[Path, Path], tmp_path: Path) -> None:
    source, answers = tmp_path / "sources" / "library.cpp", []
    for answer in ("42", "13"):
        source.write_text(f'extern "C" int answer() {{ return {answer}; }}')
        (path,) = build.build(places[0], [build.choose_variant()])
        answers.append(library._load(path).answer())
    assert answers == [42, 13]


@needs_compiler
@pytest.mark.usefixtures("places", "no_home")
def test_without_a_home_nothing_is_kept() -> None:
    assert start() == [NOT_KEPT, *COMPILES]


def test_a_thread_keeps_its_team_which_grows() -> None:
    def call() -> None:
        assert library.team()[1] == num_cores()
        library.set_threads(1)
        _, one = library.team()
        library.set_threads(num_cores() + 1)
        large, more = library.team()
        assert (one, more) == (1, num_cores() + 1)
        library.set_threads(1)
        again, one = library.team()
        assert (again.value, one) == (large.value, 1)
        with pytest.raises(ValueError, match="members: 0 is less than 1"):
            library.set_threads(0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_a_team_ends_with_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    destroy = library._destroy

    def watched(pid: int, address: ctypes.c_void_p) -> None:
        destroy(pid, address)  # waits for the team's threads
        ended.append(address.value)

    monkeypatch.setattr(library, "_destroy", watched)
    with ThreadPoolExecutor(1) as pool:
        address, _ = pool.submit(library.team).result()
        assert not ended
    assert ended == [address.value]


FORKS = """
import gc, os
from pathlib import Path
from worker_svc.kernels.cpu import library

def count_threads():
    return len(list(Path("/proc/self/task").iterdir()))

library.set_threads(2)
parents, _ = library.team()
assert count_threads() == 2
if not os.fork():
    assert count_threads() == 1
    own, members = library.team()
    assert members == 2 and own.value != parents.value
    gc.collect()  # the parent's team, which would wait for threads that do not exist here
    assert count_threads() == 2
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
again, _ = library.team()
assert again.value == parents.value
"""


def test_a_fork_makes_its_own_team() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
