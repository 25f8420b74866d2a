"""The wheel holds only the client, which runs the examples without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.client.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "nano_vllm_grpc", "frontend", "shared", "cli")
EXAMPLES = ROOT / "examples"
# Part of what each one prints. The server's completions shift characters along the alphabet.
EXAMPLE_OUTPUTS = {
    "generate.py": "'Xibu!jt!28!,!36@'",  # What is 17 + 25?
    "stream.py": "Podf!vqpo!b!ujnf",
    "chat.py": "> Tell me a story.",
    "async_many.py": "an empty prompt: INVALID_ARGUMENT",
    "plain_grpc.py": "Podf!vqpo!b!ujnf",
    "several.py": "2   -2.500 'Rqfh#xsrq#d#wlph'",  # the last of the beams
    "structured_output.py": "Podf!vqpo!b!ujnf",
}
# Other people's packages that share the names of the checkout's folders.
DECOYS = ("bench", "cli", "deploy", "frontend", "shared", "tools")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, target = ROOT / name, directory / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", directory)
    subprocess.run([*PIP, "wheel", *options, directory / "source"], check=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, the decoys and this one's libraries, but not the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", packages, wheel], check=True
    )
    for name in DECOYS:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(f"raise RuntimeError('imports {name}')")
    return environment / "bin" / "python"


def run(python: Path, directory: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter in `directory`, outside the checkout."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *map(str, args)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_wheel_holds_only_its_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top_level,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level) == b"nano_vllm_grpc\n"
    folders = {name.split("/")[0] for name in names}
    assert len(folders) == 2
    assert all(folder.startswith("nano_vllm_grpc") for folder in folders)


def test_every_module_can_be_imported(python: Path, tmp_path: Path) -> None:
    script = (
        "import importlib, pkgutil, nano_vllm_grpc as package\n"
        "for each in pkgutil.walk_packages(package.__path__, 'nano_vllm_grpc.'):\n"
        "    print(importlib.import_module(each.name).__name__)"
    )
    done = run(python, tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    clients = {path.stem for path in (ROOT / "nano_vllm_grpc").glob("[!_]*.py")}
    assert {f"nano_vllm_grpc.{name}" for name in clients} <= set(done.stdout.split())


def test_all_examples_are_tested() -> None:
    # examples/private_stack.py needs a real stack: test_private_stack.py runs what it shows.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXAMPLE_OUTPUTS, "private_stack.py"}


@pytest.mark.parametrize("name", EXAMPLE_OUTPUTS)
def test_examples_run_beside_other_packages(
    python: Path, tmp_path: Path, server: FakeServer, name: str
) -> None:
    done = run(python, tmp_path, EXAMPLES / name, server.address)
    assert done.returncode == 0, done.stderr
    assert EXAMPLE_OUTPUTS[name] in done.stdout


def test_the_command_without_a_checkout_fails_with_a_message(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-m", "nano_vllm_grpc", "up")
    assert done.returncode == 1
    assert "from a checkout of the project" in done.stderr


def test_a_private_stack_without_a_checkout_raises_an_error(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, EXAMPLES / "private_stack.py")
    assert done.returncode == 1
    assert "StackError: a private stack needs a checkout of nano-vllm-grpc" in done.stderr


def test_the_client_is_typed(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "typed.py"
    script.write_text(
        "from nano_vllm_grpc import LLM, SamplingParams\n"
        "outputs = LLM('host:1').generate('a', SamplingParams(max_tokens=8))\n"
        "reveal_type(outputs[0]['token_ids'])\n"
    )
    checker = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python)
    done = run(Path(checker[0]), tmp_path, *checker[1:], script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "list[int]"' in done.stdout
