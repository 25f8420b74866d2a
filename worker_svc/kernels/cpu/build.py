"""Compiles the C++ library of the CPU kernels: `python -m worker_svc.kernels.cpu.build`.

A library is the file SOURCES/VARIANT-COMPILER-CONTENT.so in a folder. SOURCES is a digest of the
sources and the flags, CONTENT one of the file. A variant is the machine code for CPUs with certain
features. Flags name these features and not the CPU of this machine, so that an image can hold the
code for all machines.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from worker_svc.errors import StartError
from worker_svc.kernels.cpu_features import has
from worker_svc.user_cache import (
    DamagedError,
    digest_of,
    digest_of_sources,
    keep,
    make_folders,
    private_file,
    private_folder,
)

log = structlog.get_logger(__name__)

SOURCES = Path(__file__).parent / "native"
PREBUILT = SOURCES / "build"  # what `make setup` or the build of an image compiles

# No flag may let the compiler contract or reorder operations: a row's bits must not depend on where
# it is computed.
FLAGS = [
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fPIC", "-pthread"),
]
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# Variants with the features that they need, the best first.
VARIANTS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "avx512vnni", "avx512bf16"),
    "avx512vnni": (*_AVX512, "avx512vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avxvnni"),
    "avx2": _AVX2,
    "generic": (),
}
_DIGITS = 32  # of each digest in a library's path
_KEPT = 8  # the maximum number of digests in a folder; each branch may have its own


class CompilerError(StartError):
    """There is no compiler, or it cannot compile the kernels."""


def choose_variant(has: Callable[[str], bool] = has) -> str:
    """The best variant for a CPU that has these features."""
    return next(name for name, needed in VARIANTS.items() if all(map(has, needed)))


def digest() -> str:
    """The digest of the sources, the flags and the kind of machine."""
    paths = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    others = repr((FLAGS, VARIANTS, platform.machine()))
    return digest_of_sources(SOURCES, paths, others)[:_DIGITS]


def find(base: Path, variant: str) -> Path | None:
    """The library in folder `base` that was asked for last, built by any compiler. It may be
    damaged."""
    found = (base / digest()).glob(f"{variant}-*-{'?' * _DIGITS}.so")  # not of earlier versions
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Opens a library -> a descriptor of the bytes that were compiled.

    Raises:
        DamagedError: the file has other bytes.
        OSError: the file is missing, or other users may write to it.
    """
    with (
        private_folder(path.parent) as folder,
        private_file(folder, path.name) as number,
    ):
        if digest_of(number)[:_DIGITS] != path.stem.rpartition("-")[2]:
            raise DamagedError(f"{path.name} does not have the bytes that were compiled")
        yield number


def build(base: Path, variants: Iterable[str]) -> list[Path]:
    """Compiles those variants that folder `base` does not have yet, or whose files are damaged ->
    their files.

    Waits while another process compiles the same sources. A file appears when it is complete.

    Raises:
        CompilerError: there is no compiler, or it cannot compile the kernels.
        OSError: the folder cannot be written to, or other users may write to it.
    """
    compiler = Compiler.find()
    folder = base / digest()
    make_folders(folder, 0o755)  # users may load what root has built
    with ExitStack() as stack:
        number = stack.enter_context(private_folder(folder))
        lock = stack.enter_context(private_file(number, "lock", os.O_RDWR | os.O_CREAT))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part in folder.glob("part-*"):  # of a process that was killed
            shutil.rmtree(part, ignore_errors=True)
        found = {name: _intact(folder, f"{name}-{compiler.digest}-") for name in variants}
        if missing := [name for name, path in found.items() if path is None]:
            part = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix="part-")))
            found |= compiler.compile(missing, part, folder)
        libraries = [path for path in found.values() if path is not None]
        for path in (folder, *libraries):
            os.utime(path)  # what was asked for last is found first and dropped last
    _drop_old(base)
    return libraries


def _intact(folder: Path, prefix: str) -> Path | None:
    """The library whose name begins with `prefix`. Damaged ones are removed."""
    for path in folder.glob(f"{prefix}*.so"):
        try:
            with opened(path):
                return path
        except DamagedError as error:
            log.warning("compiled CPU kernels are damaged; compiling again", reason=str(error))
            path.unlink()
    return None


def _drop_old(base: Path) -> None:
    """Removes all folders but the newest. A process that has loaded a library keeps it."""
    with suppress(OSError):
        folders = [
            each for each in base.iterdir() if re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", each.name)
        ]
        folders.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for folder in folders[_KEPT:]:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Compiler:
    words: tuple[str, ...]  # of its command

    @staticmethod
    def find() -> Compiler:
        """The compiler of $CXX, or c++.

        Raises:
            CompilerError: it is not installed.
        """
        words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        if not shutil.which(words[0]):
            raise CompilerError(
                f"the CPU kernels have to be compiled, and there is no C++ compiler ({words[0]}); "
                "install one, such as Debian's package g++"
            )
        return Compiler(tuple(words))

    @cached_property
    def digest(self) -> str:
        """Eight digits that depend on the compiler and its version."""
        version = self._run(["--version"], "tell its version")
        return hashlib.sha256(version.encode()).hexdigest()[:8]

    def compile(self, variants: Sequence[str], part: Path, folder: Path) -> dict[str, Path]:
        """Compiles libraries in folder `part`, then moves them to `folder` -> paths by variant."""
        sources = sorted(SOURCES.glob("*.cpp"))

        def compile_source(variant: str, source: Path) -> None:
            flags = [*FLAGS, *(f"-m{feature}" for feature in VARIANTS[variant])]
            target = part / f"{variant}-{source.stem}.o"
            self._run([*flags, "-c", str(source), "-o", str(target)], f"compile {source.name}")

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_source, *zip(*product(variants, sources), strict=True)))
        libraries = {}
        for variant in variants:
            objects = [str(part / f"{variant}-{source.stem}.o") for source in sources]
            linked = part / f"{variant}-{self.digest}"
            self._run(["-shared", "-pthread", *objects, "-o", str(linked)], f"link {linked.name}")
            linked.chmod(0o755)  # the umask may let others write
            path = folder / f"{linked.name}-{digest_of(linked)[:_DIGITS]}.so"
            keep(linked, path)
            libraries[variant] = path
        return libraries

    def _run(self, arguments: list[str], purpose: str) -> str:
        ran = subprocess.run(
            [*self.words, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if ran.returncode:
            lines = ran.stderr.splitlines()
            reason = next((line for line in lines if "error" in line), "".join(lines[:1]))
            raise CompilerError(
                f"{shlex.join(self.words)} cannot {purpose}: {reason or ran.returncode} "
                "(the CPU kernels need GCC 11, Clang 14 or a newer one)"
            )
        return ran.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.kernels.cpu.build",
        description="Compiles the CPU kernels for this machine, with $CXX or c++.",
    )
    parser.add_argument("--all", action="store_true", help="for all machines like this one, too")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="DIR")
    options = parser.parse_args(arguments)
    variants = [choose_variant()]
    if options.all:
        variants = list(VARIANTS) if platform.machine() == "x86_64" else ["generic"]
    started = time.monotonic()
    try:
        build(options.out, variants)
    except (CompilerError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    took = time.monotonic() - started
    print(f"the CPU kernels are compiled for {', '.join(variants)} ({took:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
