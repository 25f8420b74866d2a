"""Builds the wheel: the Python client alone, as the package `nano_vllm_grpc`.

The services, their launcher and the tools run from a checkout, in folders whose names other
projects use, too. An editable install makes those folders importable and skips what is done here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

PACKAGE = "nano_vllm_grpc"
# The files that a client needs, by the folder that becomes the package.
SOURCES = {
    "frontend": ["py.typed"],
    "frontend/client": ["*.py"],
    "shared": ["channels.py", "tls.py", "pb/__init__.py", "pb/frontend_pb2*.py*"],
}
NAMES = re.compile(r"\bfrontend\.client\b|\bshared(?=\.(?:channels|pb|tls)\b)")


class BuildClient(build_py):
    """Copies the client into an empty folder, under its own name."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        for folder, patterns in SOURCES.items():
            for source in (each for pattern in patterns for each in Path(folder).glob(pattern)):
                target = Path(self.build_lib, PACKAGE, source.relative_to(folder))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(NAMES.sub(PACKAGE, source.read_text()))


class ClientMetadata(egg_info):
    """Declares that package as the wheel's content, not the folders of the checkout."""

    def run(self) -> None:
        super().run()
        Path(self.egg_info, "top_level.txt").write_text(f"{PACKAGE}\n")


class ClientWheel(bdist_wheel):
    """Leaves out the command line, which starts what only a checkout has."""

    def run(self) -> None:
        self.distribution.entry_points = {}
        if self.dist_info_dir:
            Path(self.dist_info_dir, "entry_points.txt").unlink(missing_ok=True)
        super().run()


setup(
    cmdclass={"bdist_wheel": ClientWheel, "build_py": BuildClient, "egg_info": ClientMetadata},
)
