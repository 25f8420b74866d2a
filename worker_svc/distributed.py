"""Tensor parallelism: the ranks of one model and the collectives between them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group, _set_pg_timeout

from worker_svc.errors import RanksLostError, SupersededError

# The maximum wait for the other ranks in a step. After it, a rank gives up the step.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# The maximum wait for the other ranks in Configure.
JOIN_TIMEOUT = timedelta(seconds=30)
# How long ranks that have met may take to connect. Gloo waits that long whatever else happens.
CONNECT_TIMEOUT = timedelta(seconds=10)
_GATHERED_ROWS = 1024  # at a time, because the parts of all ranks take memory
_POLL_S = 0.01
_CONNECTION_S = 1.0  # for a connection to rank 0's store

# Renamed in torch 2.13, which warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = TypeVar("Result")
Collective = Callable[[torch.Tensor], torch.Tensor]


class TensorParallel:
    """One rank's view of its process group, passed to the layers that need it.

    Its collectives raise RanksLostError.

    The group is rebuilt in each epoch, so that a restarted rank can join the surviving ranks, whose
    weights stay loaded. With one rank, or before the first `join` (in the warm-up step), every
    collective is the identity.
    """

    def __init__(self, rank: int = 0, size: int = 1, in_order: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._in_order = in_order
        self._store: TCPStore | None = None
        self._joined = False
        self.waiting = False  # whether a collective on a CPU is waiting for the other ranks
        # While a model is traced: notes down an `all_reduce` instead of doing it.
        self.defer: Callable[[Collective, torch.Tensor], torch.Tensor] | None = None

    def join(
        self,
        epoch: int,
        device: torch.device,
        master_addr: str,
        master_port: int,
        superseded: Callable[[], bool],
    ) -> None:
        """Leaves the old group and forms the group of `epoch` with the other ranks, which must also
        call `join`. Rank 0 hosts the store through which they meet.

        Args:
            superseded: whether to stop waiting because there is a newer epoch.

        Raises:
            SupersededError: see `superseded`.
            RuntimeError: the other ranks did not join within `JOIN_TIMEOUT`, or the address cannot
                be used.
        """
        if self.size == 1:
            return
        self.leave()
        if self._store is None or self.rank != 0:  # rank 0 may be new: connect again
            _keep_to_interface_towards(master_addr, master_port)
            if self.rank != 0:
                _wait(lambda: _listens(master_addr, master_port), superseded)
            self._store = self._open_store(master_addr, master_port)
        store = PrefixStore(f"epoch-{epoch}", self._store)
        self._meet(store, superseded)
        on_gpu = device.type == "cuda"
        # A rank that loses a peer keeps its weights for the next epoch. So NCCL's watchdog must not
        # end its process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT if on_gpu else CONNECT_TIMEOUT,
            device_id=device if on_gpu else None,  # connects now, not in the first collective
        )
        _set_pg_timeout(COLLECTIVE_TIMEOUT)
        self._joined = True

    def _open_store(self, host: str, port: int) -> TCPStore:
        """Opens the store, which rank 0 serves to the other ranks. Rank 0 listens only on the
        address that `host` names; by default the store would listen on all addresses."""
        listener = _at_first_address(host, port, _listen) if self.rank == 0 else None
        return TCPStore(
            host,
            port,
            is_master=self.rank == 0,
            wait_for_workers=False,
            timeout=JOIN_TIMEOUT,
            master_listen_fd=listener.detach() if listener else None,  # the store owns it now
        )

    def _meet(self, store: PrefixStore, superseded: Callable[[], bool]) -> None:
        """Waits until all ranks have registered in the store.

        Forming the group also waits for them, but does not notice a newer epoch. If a rank is
        killed meanwhile, its successor never joins this group: it waits for the next epoch.
        """
        keys = [f"rank-{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "")
        _wait(lambda: store.check(keys), superseded)

    def leave(self) -> None:
        """Leaves the current group, if any, even if the group has lost a rank. NCCL's kernels would
        wait for that rank for ever, and only an abort makes them return."""
        if not self._joined:
            return
        self._joined = False
        if dist.get_backend() == "nccl":
            _abort_process_group()
        else:
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place."""
        if self.defer is not None:
            return self.defer(self.all_reduce, x)
        if self._joined:
            # Libraries add up more than two parts in an order that depends on their size.
            if self._in_order and self.size > 2 and x.is_floating_point():
                for rows in x.split(_GATHERED_ROWS):
                    rows.copy_(reduce(torch.add, self.all_gather(rows).unbind()))
                return x
            with self._collective():
                dist.all_reduce(x)
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Takes the maximum of `x` over the ranks, element by element, in place."""
        if self._joined:
            with self._collective():
                dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank -> [size, ...], equal on all ranks."""
        if not self._joined:
            return x.unsqueeze(0).expand(self.size, *x.shape)
        gathered = x.new_empty(self.size, *x.shape)
        with self._collective():
            _all_gather_single(gathered.view(-1), x.contiguous().view(-1))
        return gathered

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        except RuntimeError as error:
            raise RanksLostError(str(error)) from error
        finally:
            self.waiting = False


def _wait(met: Callable[[], bool], superseded: Callable[[], bool]) -> None:
    """Waits until `met`.

    Raises:
        SupersededError, RuntimeError: as `TensorParallel.join`.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while not met():
        if superseded():
            raise SupersededError
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks met within {JOIN_TIMEOUT.total_seconds():g} s")
        time.sleep(_POLL_S)


def _listens(host: str, port: int) -> bool:
    """Whether rank 0's store takes connections. A client of the store that is refused tries again
    only after about half a second, and does not notice a newer epoch meanwhile."""
    try:
        socket.create_connection((host, port), _CONNECTION_S).close()
    except OSError:
        return False
    return True


def _keep_to_interface_towards(host: str, port: int) -> None:
    """Makes collectives listen only on the interface through which this rank reaches rank 0, even
    if it is loopback. By default Gloo takes the address of the host's own name, and NCCL takes
    every interface but loopback. Interfaces that the user has named are kept."""
    address = _at_first_address(host, port, _source_address)
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, a prefix
            return
    raise RuntimeError(f"no interface of this host has {address}, its address towards {host}")


def _at_first_address(host: str, port: int, use: Callable[[int, Any], Result]) -> Result:
    """Calls `use` on each address of `host` in turn -> its first result without an OSError.

    Raises:
        RuntimeError: `host` has no address, or `use` failed on all of them.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"ranks cannot meet at {host}, port {port}: {error}") from error
    reasons = []
    for family, _, _, _, address in candidates:
        try:
            return use(family, address)
        except OSError as error:
            reasons.append(str(error))
    raise RuntimeError(f"ranks cannot meet at {host}, port {port}: {'; '.join(reasons)}")


def _listen(family: int, address: Any) -> socket.socket:
    """Listens at `address`, even while connections of a dead rank 0 linger (SO_REUSEADDR)."""
    return socket.create_server(address, family=family)


def _source_address(family: int, address: Any) -> str:
    """The source address of this host's packets to `address`. Sends no packet."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        source: str = probe.getsockname()[0]
        return source
