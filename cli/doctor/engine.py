"""Checks an engine with the services' own code: `python -m cli.doctor.engine SERVICE...`.

Prints JSON lines. The settings are in the environment, as for the services. `doctor` runs this as
a separate process, because torch and transformers take long to import, and may crash.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from cli.doctor.host import Check, check_shared_memory
from frontend.text.model_files import ModelFilesError, read_model_facts
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2
from shared.config import load_settings
from shared.errors import InvalidArgumentError
from shared.telemetry.logging import configure_logging
from worker_svc.attention.base import Backend
from worker_svc.devices.base import Platform
from worker_svc.devices.choice import choose_platform
from worker_svc.devices.driver import driver_version
from worker_svc.errors import StartError
from worker_svc.kv_cache import TOKEN_ID_BYTES, blocks_that_fit, choose_max_model_len
from worker_svc.models.chat_formats import choose_parsers
from worker_svc.models.config import ModelConfig, load_model_config
from worker_svc.models.decoder import attention_shape
from worker_svc.settings import WorkerSettings
from worker_svc.weights.files import WeightReader, weight_files
from worker_svc.weights.quantization.choice import choose_quantization

_CPU_SETS = {
    "AVX2": "avx2",
    "AVX-512": "avx512bw",
    "AVX-512 VNNI": "avx512vnni",
    "AVX VNNI": "avxvnni",
    "AVX-512 BF16": "avx512bf16",
    "AMX": "amx-bf16",
}
_BITS = {"int8": 8, "int4": 4, "fp8": 8}
_REMEDIES = {
    "device": "see nvidia-smi; install the build for the driver (pytorch.org), or use DEVICE=cpu",
    "kernels": "install GCC 11 or newer, such as with apt install g++",
    "attention": "",  # the reason names an alternative
    "model": "docs/get-started/models.md lists the models that are served",
    "settings": "docs/reference/settings.md",
    "weights": "download or copy the model again",
    "memory": "use QUANTIZATION=int8 or int4, or a smaller model, or end other processes",
    "tokenizer": "download or copy the model again",
}


def main(services: list[str]) -> None:
    settings = load_settings(WorkerSettings, [])
    configure_logging(settings, "doctor")
    for each in checks(settings, services):
        print(json.dumps(dataclasses.asdict(each)), flush=True)


def checks(settings: WorkerSettings, services: list[str]) -> Iterator[Check]:
    if "worker" in services:
        yield _check_torch(settings)
        yield from _check_worker(settings)
    if "frontend" in services:
        yield _check_tokenizer(Path(settings.model))


def _check_torch(settings: WorkerSettings) -> Check:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"{torch.__version__}, {build}"
    if not shutil.which("nvidia-smi") or torch.cuda.is_available() or settings.device == "cpu":
        return Check("torch", "ok", found)
    remedy = "install the build for the GPU's driver (pytorch.org), or use DEVICE=cpu"
    return Check("torch", "warning", f"{found}: finds no GPU, although nvidia-smi exists", remedy)


def _check_worker(settings: WorkerSettings) -> Iterator[Check]:
    """Runs the quick steps of a worker's start."""
    name = "device"
    try:
        platform = choose_platform(settings)
        yield _check_device(platform, settings.engines_on_host * settings.tp)
        if platform.device.type == "cuda" and settings.tp > 1:
            yield check_shared_memory()
        if platform.device.type == "cpu":
            name = "kernels"
            yield _check_kernels()
        name, directory = "model", Path(settings.model)
        config = load_model_config(directory)
        dtype = platform.choose_dtype(settings.dtype, config.dtype)
        config = dataclasses.replace(config, dtype=dtype)
        weights_format = choose_quantization(settings.quantization, config.quantization).name
        found = f"{config.family.architecture}, {config.num_layers} layers, {dtype}"
        yield Check(name, "ok", f"{found}, quantization: {weights_format}")
        yield _check_parsers(directory)
        name = "settings"
        length = choose_max_model_len(settings, config.max_model_len)
        name = "attention"
        shape = attention_shape(config, settings.tp, platform.device, settings.kv_dtype)
        backend = platform.attention_backend(settings, shape)
        yield _check_attention(backend, platform)
        name = "weights"
        yield _check_weights(directory, config, platform)
        name = "memory"
        yield _check_memory(settings, platform, config, backend, weights_format, length)
    except StartError as error:
        yield Check(name, "wrong", str(error), _REMEDIES[name])


def _check_parsers(model_dir: Path) -> Check:
    reasoning, calls = (name or "not read" for name in choose_parsers(model_dir))
    return Check("gateway", "ok", f"tool calls: {calls}, reasoning: {reasoning}")


def _check_device(platform: Platform, ranks: int) -> Check:
    if platform.device.type == "cpu":
        from worker_svc.kernels.cpu_features import has

        sets = [name for name, feature in _CPU_SETS.items() if has(feature)]
        if "AVX2" in sets:
            return Check("device", "ok", f"cpu with {', '.join(sets)}")
        remedy = "use a machine with AVX2 or AVX-512; without them, steps are slow"
        return Check("device", "warning", f"cpu with {', '.join(sets) or 'no AVX2'}", remedy)
    properties = torch.cuda.get_device_properties(platform.device)
    gpus = torch.cuda.device_count()
    memory = _size(properties.total_memory)
    found = f"{gpus} x {properties.name}, {memory}, driver {driver_version()}"
    if ranks > gpus:
        found += f" for {ranks} ranks"
        return Check("device", "warning", found, "run the other ranks on other hosts")
    return Check("device", "ok", found)


def _check_kernels() -> Check:
    """
    Raises:
        StartError: the kernels cannot be compiled or loaded.
    """
    from worker_svc.kernels.cpu.build import choose_variant
    from worker_svc.kernels.cpu.library import library

    library()
    return Check("kernels", "ok", f"compiled for {choose_variant()}")


def _check_attention(backend: Backend, platform: Platform) -> Check:
    if platform.device.type == "cpu":
        return Check("attention", "ok", backend.name)
    from worker_svc.attention import fa3, flash_attn

    there = [name for name, load in (("2", flash_attn.load), ("3", fa3.load)) if load()]
    if not there:
        remedy = "pip install flash-attn, for faster prompts"
        return Check("attention", "warning", f"{backend.name}; FlashAttention is missing", remedy)
    return Check("attention", "ok", f"{backend.name}; FlashAttention {' and '.join(there)}")


def _check_weights(directory: Path, config: ModelConfig, platform: Platform) -> Check:
    """Opens all files, and checks that they have the tensors that the index lists.

    Raises:
        ModelError: a tensor is missing, or a file is truncated.
    """
    with WeightReader(directory, config.dtype, platform.device):
        pass
    files = weight_files(directory)
    size = sum(path.stat().st_size for path in files)
    return Check("weights", "ok", f"{_size(size)} in {len(files)} *{files[0].suffix}")


def _check_memory(
    settings: WorkerSettings,
    platform: Platform,
    config: ModelConfig,
    backend: Backend,
    weights_format: str,
    max_model_len: int,
) -> Check:
    """Checks that the weights and the cache of one sequence of full length fit. The further memory
    of steps is known only once they run."""
    on_cpu = platform.device.type == "cpu"
    bits = _BITS.get(weights_format, 8 * config.dtype.itemsize)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = config.num_weights * bits // 8 + embedding * config.dtype.itemsize
    # On a CPU, the ranks of all engines share the memory.
    weights = weights * settings.engines_on_host if on_cpu else weights // settings.tp
    free = psutil.virtual_memory().available
    if not on_cpu:
        free, _ = torch.cuda.mem_get_info(platform.device)
    if weights > free:
        raise StartError(f"the weights need {_size(weights)}, but only {_size(free)} are free")
    cache = platform.cache_bytes(settings, 0 if on_cpu else weights)
    cache = cache * (free - weights) // free if on_cpu else cache
    block = (backend.shape.cache_bytes_per_token + TOKEN_ID_BYTES) * backend.block_size
    blocks = blocks_that_fit(settings, cache, block, backend.block_size, max_model_len)
    tokens = blocks * backend.block_size
    return Check(
        "memory", "ok", f"{_size(weights)} of weights, and a cache of {tokens} tokens, fit"
    )


def _check_tokenizer(directory: Path) -> Check:
    try:
        facts = read_model_facts(directory)
        tokenizer = Tokenizer(directory, threads=1)
    except ModelFilesError as error:
        return Check("tokenizer", "wrong", str(error), _REMEDIES["tokenizer"])
    size = len(tokenizer.vocabulary.tokens)
    found = f"{size} tokens"
    if size < facts.vocab_size / 2:  # transformers needs no files for one
        found += f", but the model has {facts.vocab_size}"
        return Check("tokenizer", "wrong", found, _REMEDIES["tokenizer"])
    try:
        question = frontend_pb2.ChatMessage(role="user", content="Hello")
        asyncio.run(tokenizer.encode_chat(frontend_pb2.Chat(messages=[question])))
    except InvalidArgumentError as error:
        return Check("tokenizer", "warning", str(error), "chats are rejected, texts are served")
    finally:
        tokenizer.close()
    return Check("tokenizer", "ok", f"{found}, and a chat template")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >> 30 else f"{count / 2**20:.0f} MiB"


if __name__ == "__main__":
    main(sys.argv[1:])
