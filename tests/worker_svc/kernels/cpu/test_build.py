"""How the C++ library of the CPU kernels is compiled, and where it is kept."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
from structlog.testing import capture_logs

from tests.damage import damages
from tests.worker_svc.untrusted import untrusted
from worker_svc.kernels.cpu import build as module
from worker_svc.kernels.cpu.build import VARIANTS, CompilerError, build, choose_variant, find

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")

SOURCES = {
    "answer.h": "extern const int ANSWER;",
    "answer.cpp": '#include "answer.h"\nconst int ANSWER = 42;',
    "library.cpp": '#include "answer.h"\nextern "C" int answer() { return ANSWER; }',
}


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(module, "SOURCES", folder)
    return folder


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that lists, in the file calls, what it is asked for."""
    path = tmp_path / "cxx"
    path.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec c++ "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def compiled(tmp_path: Path) -> list[str]:
    """The names of the sources that the compiler has compiled."""
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    return sorted(Path(words[words.index("-c") + 1]).name for words in calls if "-c" in words)


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """A process that builds once its standard input is closed."""
    program = (
        "import sys; from pathlib import Path; from worker_svc.kernels.cpu import build\n"
        "build.SOURCES = Path(sys.argv[1]); sys.stdin.read()\n"
        "build.build(Path(sys.argv[2]), ['generic'])"
    )
    paths = str(tmp_path / "sources"), str(tmp_path / "out")
    return subprocess.Popen([sys.executable, "-c", program, *paths], stdin=PIPE, text=True)


def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    (path,) = build(tmp_path / "out", ["generic"])
    assert ctypes.CDLL(str(path)).answer() == 42
    assert find(tmp_path / "out", "generic") == path
    assert build(tmp_path / "out", ["generic"]) == [path]
    assert compiled(tmp_path) == ["answer.cpp", "library.cpp"]
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock"}


def test_processes_that_build_at_once_compile_once(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    for each in processes:
        assert each.stdin
        each.stdin.close()
    assert [each.wait() for each in processes] == [0, 0, 0]
    assert compiled(tmp_path) == ["answer.cpp", "library.cpp"]


def test_a_build_that_is_cut_off_leaves_no_library(tmp_path: Path, compiler: Path) -> None:
    works = compiler.read_text()
    # The first that it is asked to link has been compiled. Nothing writes after the kill.
    cut_off = 'case "$*" in -shared*) kill -9 $PPID; exit;; esac\nexec'
    compiler.write_text(works.replace("exec", cut_off))
    process = start(tmp_path)
    process.communicate()
    assert process.returncode == -9
    assert find(tmp_path / "out", "generic") is None
    assert list(tmp_path.glob("out/*/part-*"))
    compiler.write_text(works)
    (path,) = build(tmp_path / "out", ["generic"])
    assert ctypes.CDLL(str(path)).answer() == 42
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock"}


@damages
def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    command = ["--out", str(tmp_path / "out")]
    assert module.main(command) == 0
    path = find(tmp_path / "out", choose_variant())
    assert path
    right = path.read_bytes()
    damage(path)
    with capture_logs() as logs:
        assert module.main(command) == 0
    assert path.read_bytes() == right
    assert [each["event"] for each in logs] == ["compiled CPU kernels are damaged; compiling again"]
    assert len(compiled(tmp_path)) == 4
    assert {each.name for each in path.parent.iterdir()} == {path.name, "lock"}


def test_a_library_is_on_the_disk_before_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def watched(number: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        synced.append((name, find(tmp_path / "out", "generic") is not None))
        sync(number)

    monkeypatch.setattr(os, "fsync", watched)
    (path,) = build(tmp_path / "out", ["generic"])
    linked = path.stem.rpartition("-")[0]
    assert synced == [(linked, False), (path.parent.name, True)]


@pytest.mark.parametrize("name", SOURCES)
def test_the_digest_is_of_the_content_of_the_sources(sources: Path, name: str) -> None:
    before = module.digest()
    source = sources / name
    os.utime(source, (0, 0))
    (sources / "notes.txt").touch()
    assert module.digest() == before
    source.write_text(source.read_text() + "\n")
    assert module.digest() != before


def test_the_digest_is_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = module.digest()
    monkeypatch.setattr(module, "FLAGS", [*module.FLAGS, "-g"])
    assert module.digest() != before


def test_a_compiler_of_another_version_compiles_again(tmp_path: Path, compiler: Path) -> None:
    (first,) = build(tmp_path / "out", ["generic"])
    works = compiler.read_text()
    compiler.write_text(works.replace("exec", '[ "$*" = --version ] && echo other\nexec'))
    (second,) = build(tmp_path / "out", ["generic"])
    os.utime(first, (0, 0))
    assert find(tmp_path / "out", "generic") == second != first
    compiler.write_text(works)
    assert build(tmp_path / "out", ["generic"]) == [first]
    os.utime(second, (0, 0))
    assert find(tmp_path / "out", "generic") == first


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("", "generic"),
        ("avx2", "generic"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f", "avx2"),
        ("avx2 fma f16c avxvnni", "avxvnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni avxvnni", "avx512vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16", "avx512bf16"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512bf16", "avx512"),
    ],
)
def test_the_variant_is_the_best_that_the_cpu_can_run(features: str, expected: str) -> None:
    assert choose_variant(features.split().__contains__) == expected


def test_all_variants_compile(tmp_path: Path) -> None:
    """Their flags are known, and more than one can be compiled at once."""
    variants = list(VARIANTS) if os.uname().machine == "x86_64" else ["generic"]
    assert len(build(tmp_path / "out", variants)) == len(variants)
    assert module.main(["--all", "--out", str(tmp_path / "out")]) == 0
    assert len(compiled(tmp_path)) == 2 * len(variants)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache no-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CompilerError, match=r"no C\+\+ compiler \(ccache\).*Debian's package g\+\+"
    ):
        build(tmp_path / "out", ["generic"])
    assert module.main(["--out", str(tmp_path / "out")]) == 1


def test_the_compiler_says_why_it_cannot(tmp_path: Path, sources: Path) -> None:
    (sources / "wrong.cpp").write_text("#warning of no use\nint wrong() { return nothing; }")
    with pytest.raises(
        CompilerError, match=r"cannot compile wrong.cpp: .*error: ‘?.?nothing.*GCC 11"
    ):
        build(tmp_path / "out", ["generic"])
    assert find(tmp_path / "out", "generic") is None


def test_no_umask_lets_other_users_write(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        (path,) = build(tmp_path / "out", ["generic"])
    finally:
        os.umask(umask)
    for each in (path, path.parent, path.parent / "lock"):
        assert each.stat().st_mode & 0o022 == 0


@untrusted
def test_nothing_is_built_in_a_folder_that_others_may_have_written(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    (path,) = build(tmp_path / "out", ["generic"])
    change(path.parent)
    with pytest.raises(OSError, match=r"others?|user|link|director|exists"):
        build(tmp_path / "out", ["generic"])


def test_the_oldest_folders_are_removed(tmp_path: Path) -> None:
    """But nothing else that lies beside them."""
    others = [tmp_path / "out" / f"{age:032x}" for age in range(module._KEPT + 2)]
    for age, other in enumerate([*others, tmp_path / "out" / "other"]):
        other.mkdir(parents=True)
        (other / "generic-0.so").touch()
        os.utime(other, (10**9 - age, 10**9 - age))
    (path,) = build(tmp_path / "out", ["generic"])
    left = {each.name for each in (tmp_path / "out").iterdir()}
    kept = others[: module._KEPT - 1]
    assert left == {path.parent.name, "other", *(each.name for each in kept)}
