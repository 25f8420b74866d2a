"""Compiles the C++ library of the CPU kernels: `python -m worker_svc.kernels.cpu.build`.

A library is the file DIGEST/VARIANT-COMPILER.so in a folder. The digest is of the sources and the
flags. A variant is the machine code for CPUs with certain features. Flags name these features and
not the CPU of this machine, so that an image can hold the code for all machines.
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
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from worker_svc.errors import StartError
from worker_svc.kernels.cpu_features import has
from worker_svc.user_cache import private_file, private_folder

SOURCES = Path(__file__).parent / "native"
PREBUILT = SOURCES / "build"  # what `make setup` or the build of an image compiles

# No flag may let the compiler contract or reorder operations: a row's bits must not depend on where
# it is computed.
FLAGS = (
    "-std=c++20 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-exceptions -fno-rtti "
    "-fPIC -pthread"
).split()
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
_KEPT = 8  # the maximum number of digests in a folder; each branch may have its own


class CompilerError(StartError):
    """There is no compiler, or it cannot compile the kernels."""


def choose_variant(has: Callable[[str], bool] = has) -> str:
    """The best variant for a CPU that has these features."""
    return next(name for name, needed in VARIANTS.items() if all(map(has, needed)))


def digest(sources: Path = SOURCES) -> str:
    found = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        content = path.read_bytes()
        found.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:32]


def find(base: Path, variant: str) -> Path | None:
    """The library in `base` that was built last, by any compiler."""
    found = (base / digest()).glob(f"{variant}-*.so")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def build(base: Path, variants: Iterable[str], sources: Path = SOURCES) -> list[Path]:
    """Compiles those variants that are not in folder `base` yet -> their files.

    Waits while another process compiles the same sources. A library appears only when it is
    complete.

    Raises:
        CompilerError: there is no compiler, or it cannot compile the kernels.
        OSError: the folder cannot be written to, or other users may write to it.
    """
    compiler = Compiler.find()
    folder = base / digest(sources)
    # Others may read: root builds images for other users.
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    libraries = {name: folder / f"{name}-{compiler.digest}.so" for name in variants}
    with (
        private_folder(folder) as number,
        private_file(number, "lock", os.O_RDWR | os.O_CREAT) as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(number)  # folders used last are dropped last
        for part in folder.glob("part-*"):  # of a process that was killed
            shutil.rmtree(part, ignore_errors=True)
        missing = {name: path for name, path in libraries.items() if not path.exists()}
        with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as part:
            compiler.compile(sorted(sources.glob("*.cpp")), missing, Path(part))
        for path in libraries.values():
            os.utime(path)  # `find` prefers the file that was asked for last
    _drop_old(base)
    return list(libraries.values())


def _drop_old(base: Path) -> None:
    """Removes all folders but the newest. A process that has loaded a library keeps it."""
    with suppress(OSError):
        folders = [each for each in base.iterdir() if re.fullmatch("[0-9a-f]{32}", each.name)]
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
                f"the CPU kernels are not compiled yet, and there is no C++ compiler ({words[0]}); "
                "install one, such as Debian's package g++"
            )
        return Compiler(tuple(words))

    @cached_property
    def digest(self) -> str:
        """Eight digits that depend on the compiler's version and target."""
        version = self._run(["--version"], "tell its version")
        return hashlib.sha256(version.encode()).hexdigest()[:8]

    def compile(self, sources: list[Path], libraries: dict[str, Path], part: Path) -> None:
        """Compiles libraries, by variant, in folder `part`, then moves them to their places."""

        def compile_source(job: tuple[str, Path]) -> None:
            variant, source = job
            target = part / f"{variant}-{source.stem}.o"
            flags = [*FLAGS, *(f"-m{feature}" for feature in VARIANTS[variant])]
            self._run([*flags, "-c", str(source), "-o", str(target)], f"compile {source.name}")

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_source, [(each, file) for each in libraries for file in sources]))
        for variant, library in libraries.items():
            objects = [str(part / f"{variant}-{source.stem}.o") for source in sources]
            linked = part / library.name
            self._run(["-shared", "-pthread", *objects, "-o", str(linked)], f"link {linked.name}")
            linked.chmod(0o755)  # the umask may let others write
            linked.replace(library)

    def _run(self, arguments: list[str], purpose: str) -> str:
        ran = subprocess.run([*self.words, *arguments], capture_output=True, text=True, check=False)
        if ran.returncode:
            lines = ran.stderr.splitlines()
            reason = next((line for line in lines if "error" in line), "".join(lines[:1]))
            raise CompilerError(
                f"{shlex.join(self.words)} cannot {purpose}: {reason or ran.returncode}; "
                "the CPU kernels need GCC 11, Clang 14 or a newer one"
            )
        return ran.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.kernels.cpu.build", description=__doc__
    )
    parser.add_argument("--all", action="store_true", help="all variants, not only this machine's")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="DIR")
    options = parser.parse_args(arguments)
    variants = [choose_variant()]
    if options.all:
        variants = list(VARIANTS) if platform.machine() == "x86_64" else ["generic"]
    started = time.monotonic()
    try:
        libraries = build(options.out, variants)
    except (CompilerError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"CPU kernels in {libraries[0].parent}: {', '.join(variants)} ({time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
