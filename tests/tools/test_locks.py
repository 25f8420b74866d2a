"""requirements/*.txt lock, with hashes, all that pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = ("frontend", "scheduler", "worker")
EXTRAS = ("dev", "ray", *IMAGES)
WITH_TORCH = ("dev", "scheduler", "worker")
# Installed apart, see the Makefile.
APART = {"torch", "triton"}
OF_CUDA = set(re.findall("^[a-z].*", (FOLDER / "unlocked.txt").read_text(), flags=re.M))
HASHES = re.compile(r"(?: --hash=sha256:[0-9a-f]{64})+")


def entries(lock: str) -> dict[str, tuple[str, str]]:
    """Version and hashes by package; fails if a line is anything else."""
    text = re.sub("^#.*\n", "", (FOLDER / f"{lock}.txt").read_text(), flags=re.M)
    found = {}
    for line in re.sub(r" *\\\n *", " \\\\ ", text).splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==([^ ;]+)(?: ; [^\\]+?)?((?: \\ --hash=\S+)*)", line)
        assert match, f"{lock}: {line[:80]}"
        found[match[1]] = match[2], match[3].replace(" \\", "")
    return found


def asked_for(extra: str) -> Iterator[Requirement]:
    """The requirements of an extra, with those of the extras that it names and of the client."""
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]):
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for each in requirement.extras:
                yield from asked_for(each)
        else:
            yield requirement


@pytest.mark.parametrize("extra", EXTRAS)
def test_all_requirements_are_locked(extra: str) -> None:
    locked = entries(extra)
    for requirement in asked_for(extra):
        name = canonicalize_name(requirement.name)
        if name not in APART:
            assert name in locked, f"requirements/{extra}.txt lacks {name}: make lock"
            assert requirement.specifier.contains(locked[name][0]), name


@pytest.mark.parametrize("extra", EXTRAS)
def test_requirements_of_locked_packages_are_locked(extra: str) -> None:
    """As the installed ones say: without it, `--no-deps` would leave it out, or torch fetch it."""
    locked = entries(extra)
    known = locked.keys() | APART | OF_CUDA
    for name in (*locked, *(APART - {"triton"} if extra in WITH_TORCH else ())):
        for line in _requires(name):
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert needed in known, f"{name} needs {needed}: make lock"


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # for another platform
        return []


@pytest.mark.parametrize("lock", [*EXTRAS, "triton"])
def test_every_package_has_the_hashes_of_its_files(lock: str) -> None:
    locked = entries(lock)
    assert locked
    for name, (_, hashes) in locked.items():
        assert HASHES.fullmatch(hashes), f"{name}: {hashes[:80]}"


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_the_tested_versions(image: str) -> None:
    assert entries(image).items() <= entries("dev").items()


def test_ray_needs_no_other_versions() -> None:
    """It is installed into the same environment."""
    dev = entries("dev")
    shared = {name: entry for name, entry in entries("ray").items() if name in dev}
    assert shared.items() <= dev.items()
