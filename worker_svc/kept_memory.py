"""Memory that outlives the forks of a worker: its weights and its KV cache, on a CPU.

The parent process makes empty memory files (memfd_create(2)) before its first fork, and never maps
them. The first fork fills and maps them, and the next one maps what it finds. Each file has an
index, which is written last. A fork that dies earlier leaves nothing to trust.

Weights are sealed against writing, so they survive whatever ends a fork. The cache survives only
what cannot have damaged it: see `KeptMemory.fork_ended`.

Weights lie in huge pages of 2 MiB, because a CPU needs a translation for each page that it reads.
In a virtual machine, finding those of pages of 4 KiB took about a twentieth of a step. Where Linux
does not give memory files huge pages, madvise(2) can still collapse theirs.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from shared.process.kept import KeptObject, UnusableFileError, kept_file, may_have_damaged
from worker_svc.errors import ModelError
from worker_svc.settings import WorkerSettings
from worker_svc.weights.fingerprint import file_states, model_files
from worker_svc.weights.safetensors_file import DTYPES, NAMES

log = structlog.get_logger(__name__)

State = dict[str, torch.Tensor]

_HUGE = 2 << 20
_MAX_CHUNK = 32 << 20
_ALIGNMENT = 64  # bytes, a cache line
# Constants of Linux that Python does not have.
_MADV_COLLAPSE, _MAP_FIXED = 25, 0x10
_FALLOC_PUNCH_HOLE = 0x02 | 0x01  # and keep the size
_NO_ACCESS = 0
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def kept_version(settings: WorkerSettings) -> str:
    """A text that changes with the settings, the worker's sources or the models' files. The next
    program uses the memory of this one only if it has the same text (`KeptMemory`)."""
    folder = Path(__file__).parent
    sources = [each for each in folder.rglob("*") if each.suffix in (".py", ".h", ".cpp")]
    try:
        models = [Path(each) for each in (settings.model, settings.draft_model) if each]
        files = [file for each in models for file in model_files(each)]
        return repr((settings, file_states([*sorted(sources), *files])))
    except (ModelError, OSError):  # the fork tells the user
        return uuid.uuid4().hex


@dataclass
class _Unused:
    """Memory of a chunk that no tensor has, and its place in the file."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    place: int = 0


class WeightMemory:
    """The tensors of a model, then of its draft model, in the order in which loaders ask for
    them."""

    def __init__(self, version: str = "") -> None:
        self._version = version
        self._file = kept_file("weights", version)
        self._index = KeptObject("weights-index", version)
        self.drop_unusable()
        self._begin()

    def _begin(self) -> None:
        self._chunks: list[tuple[int, int, int]] = []  # address, place in the file, size; bytes
        self._unused, self._reserved = _Unused(), _Unused()
        self._places: dict[int, int] = {}  # of the tensors in the file, by address
        self._collapsing: list[threading.Thread] = []
        self._states: list[list[tuple[str, str, list[int], int]]] | None = []  # None: given up

    def drop_unusable(self) -> None:
        """Replaces a sealed file without an index, which can neither be used nor emptied. Call it
        while there is no fork."""
        if self._is_sealed and self._found() is None:
            os.close(self._file)
            self._file = kept_file("weights", self._version)

    @property
    def _is_sealed(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def notes(self, key: str) -> Any:
        """The notes that `seal` was given with this key, or None."""
        found = self._found()
        return found["notes"] if found and found["key"] == key else None

    def _found(self) -> Any:
        """The index, or None if there is none or it describes a file that has replaced this one: a
        predecessor and its successor share the index."""
        found = self._index.read()
        return found if found and found["file"] == self._number else None

    @property
    def _number(self) -> int:
        return os.fstat(self._file).st_ino

    def states(self) -> Iterator[State]:
        """Yields what was added before `seal`, in order, from read-only memory."""
        size = os.fstat(self._file).st_size
        data = _tensor_at(_map(size, mmap.PROT_READ, mmap.MAP_PRIVATE, self._file, 0), size)
        for state in self._index.read()["states"]:
            yield {
                name: _view(data[place:], DTYPES[dtype], shape)
                for name, dtype, shape, place in state
            }

    def reserve(self, sizes: Sequence[int]) -> None:
        """Makes memory in which `new` makes tensors of these sizes, in bytes. It becomes huge pages
        on another thread, because that takes as long as reading the weights."""
        self._reserved = _Unused(*self._new_chunk(sum(map(_aligned, sizes))))
        args = self._reserved.memory.data_ptr(), len(self._reserved.memory)
        self._collapsing.append(threading.Thread(target=_collapse, args=args, daemon=True))
        self._collapsing[-1].start()

    def release(self) -> None:
        """Gives the rest of the reserved memory to `add`."""
        if len(self._reserved.memory) > len(self._unused.memory):
            self._unused, self._reserved = self._reserved, _Unused()

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the memory, to be filled and then added."""
        return self._take(self._reserved, shape, dtype)

    def add(self, state: State) -> State:
        """Adds tensors. Those that `new` has not made are copied -> the tensors in the memory."""
        entries, added = [], {}
        for name, tensor in state.items():
            kept = tensor
            if tensor.data_ptr() not in self._places:
                kept = self._take(self._unused, tensor.shape, tensor.dtype).copy_(tensor)
            added[name] = kept
            place = self._places[kept.data_ptr()]
            entries.append((name, NAMES[kept.dtype], list(kept.shape), place))
        if self._states is not None:
            self._states.append(entries)
        return added

    def give_up(self) -> None:
        """Keeps no weights. Those that were added stay valid."""
        self._states = None

    def seal(self, key: str, notes: object) -> None:
        """Makes the memory read-only, also for what was added, and lets the next fork find it.

        Args:
            key: everything on which the weights depend.
            notes: for the next fork, as JSON.
        """
        if self._states is None:
            return
        for thread in self._collapsing:
            thread.join()
        # Again, because memory may have been too fragmented while files were read.
        reasons = {_collapse(address, size) for address, _, size in self._chunks} - {""}
        if reasons:
            log.info("not all weights are in huge pages", reasons=sorted(reasons))
        for address, _, size in self._chunks:  # a writable mapping would keep it from being sealed
            _map_at(address, size, _NO_ACCESS, _NOTHING)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        try:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            log.warning("weights do not outlive this process", reason=str(error))
            self.give_up()
        for address, place, size in self._chunks:
            _map_at(address, size, mmap.PROT_READ, mmap.MAP_PRIVATE, self._file, place)
        if self._states is not None:
            index = {"file": self._number, "key": key, "notes": notes, "states": self._states}
            self._index.write(index)

    def reset(self) -> None:
        """Empties the memory.

        Raises:
            UnusableFileError: it is sealed. Weights beside it would take as much memory again.
        """
        self._begin()
        self._index.clear()  # so that the next program drops a sealed file
        if self._is_sealed:
            raise UnusableFileError("the kept weights are of another model")
        os.ftruncate(self._file, 0)

    def _take(self, unused: _Unused, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the `unused` memory, or in a new chunk if it is too large for that."""
        size = _aligned(math.prod(shape) * dtype.itemsize)
        if size > len(unused.memory):
            unused.memory, unused.place = self._new_chunk(size)
            _collapse(unused.memory.data_ptr(), len(unused.memory))
        tensor = _view(unused.memory, dtype, shape)
        self._places[tensor.data_ptr()] = unused.place
        unused.memory, unused.place = unused.memory[size:], unused.place + size
        return tensor

    def _new_chunk(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        """Memory of at least `num_bytes` in whole huge pages, and its place in the file. Chunks
        grow with the model, so that at most half of the memory of a small model is unused."""
        place = os.fstat(self._file).st_size
        size = -(-max(num_bytes, min(place, _MAX_CHUNK)) // _HUGE) * _HUGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            os.ftruncate(self._file, place + size)
        except OSError as error:  # a limit on the size of files
            log.warning("weights do not outlive this process", reason=str(error))
            self.give_up()
            return _tensor_at(_map(size, protection, _NOTHING, -1, 0), size), 0
        address = _map(size, protection, mmap.MAP_SHARED, self._file, place)
        memory = _tensor_at(address, size)
        memory[::_HUGE] = 0  # a huge page without any page cannot be collapsed
        self._chunks.append((address, place, size))
        return memory, place


class CacheMemory:
    """The tensors of a KV cache and an id, which changes whenever the contents are lost."""

    def __init__(self, version: str = "") -> None:
        self._file = kept_file("cache", version)
        # A shorter file would end its readers.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._index = KeptObject("cache-index", version)
        self._end = 0  # bytes handed out
        self._is_kept = True

    @property
    def id(self) -> str:
        """The id of the kept cache; empty if there is none."""
        found = self._index.read()
        return str(found["id"]) if found else ""

    def holds(self, cache_id: str, num_blocks: int) -> bool:
        return bool(self._index.read() == {"id": cache_id, "blocks": num_blocks})

    def new_id(self, num_blocks: int) -> str:
        """Lets the next fork find a cache of `num_blocks` blocks -> its new id."""
        cache_id = uuid.uuid4().hex
        if self._is_kept:
            self._index.write({"id": cache_id, "blocks": num_blocks})
        return cache_id

    def forget(self) -> None:
        """Forgets what the cache contains. Its tensors stay valid."""
        self._index.clear()

    def clear(self) -> None:
        """Empties the cache and gives its memory back."""
        self.forget()
        if size := os.fstat(self._file).st_size:
            _libc.fallocate(self._file, _FALLOC_PUNCH_HOLE, 0, size)

    def rewind(self) -> None:
        """Lets `tensor` begin at the first tensor again."""
        self._end, self._is_kept = 0, True

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor: zeros, or what it held before `rewind` or in the last fork.

        If there is a limit on the size of files, it has memory of its own, and no cache is kept.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, size = self._end, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not size:
            return torch.zeros(tuple(shape), dtype=dtype)
        self._end += size
        try:
            if os.fstat(self._file).st_size < self._end:
                os.ftruncate(self._file, self._end)
            mapped = mmap.mmap(self._file, size, offset=begin)
        except OSError as error:
            if self._is_kept:
                log.warning("the cache does not outlive this process", reason=str(error))
            self._is_kept = False
            return torch.empty(tuple(shape), dtype=dtype)
        return _view(torch.frombuffer(mapped, dtype=torch.uint8), dtype, shape)


class KeptMemory:
    """The weights and the cache of a worker.

    Args:
        version: see `kept_file`.
    """

    def __init__(self, version: str = "") -> None:
        self.weights = WeightMemory(version)
        self.cache = CacheMemory(version)
        self._oom_kills = _oom_kills()

    def fork_ended(self, status: int) -> None:
        """Empties the cache unless the fork ended by SIGKILL, by SIGTERM or in order. Any other end
        may have a reason that also damaged the cache. If Linux killed a process because memory was
        short, the cache's memory is needed. Drops weights that the fork sealed, but did not finish.

        Args:
            status: the fork's exit status; negative: the signal that killed it.
        """
        before, self._oom_kills = self._oom_kills, _oom_kills()
        if may_have_damaged(status) or self._oom_kills != before:
            self.cache.clear()
        self.weights.drop_unusable()


def _oom_kills() -> int:
    """The processes that Linux has killed because memory was short, here or in any container."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _view(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The first bytes of `memory` uint8, as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(address: int, size: int) -> torch.Tensor:
    """uint8 [size], never unmapped."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _collapse(address: int, size: int) -> str:
    """Moves memory into huge pages -> why some of it could not be moved, or an empty text."""
    reason = ""
    for part in range(address, address + size, _HUGE):  # in one call, a failure would end it
        if _libc.madvise(part, _HUGE, _MADV_COLLAPSE):
            reason = os.strerror(ctypes.get_errno())
    return reason


def _map(size: int, protection: int, flags: int, file: int, place: int) -> int:
    """Maps memory at the beginning of a huge page -> its address."""
    reserved = _map_at(0, size + _HUGE, _NO_ACCESS, _NOTHING)
    address = -(-reserved // _HUGE) * _HUGE
    return _map_at(address, size, protection, flags, file, place)


def _map_at(
    address: int, size: int, protection: int, flags: int, file: int = -1, place: int = 0
) -> int:
    """
    Raises:
        MemoryError: there is no address space or memory.
    """
    fixed = _MAP_FIXED if address else 0
    found: int | None = _libc.mmap(address, size, protection, flags | fixed, file, place)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise MemoryError(f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return found
