"""The ranks of one model: collectives between those that share layers, and the way of hidden states
from stage to stage."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _abort_process_group,
    _set_pg_timeout,
    _world,
)

from worker_svc.errors import RanksLostError
from worker_svc.ranks.meeting import (
    JOIN_TIMEOUT,
    at_first_address,
    keep_to_interface_towards,
    listen,
    listens,
    wait_until,
)

# The maximum wait for the other ranks of a stage in a step. After it, a rank gives up the step.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# How long ranks that have met may take to connect. If one is killed meanwhile, Gloo waits five
# times as long, whatever else happens.
CONNECT_TIMEOUT = timedelta(seconds=3)
_GATHERED_ROWS = 1024  # at a time, because the parts of all ranks take memory
# Between stages on a CPU: the maximum of numbers in a message, of messages that may be on the way,
# and of those that a rank is ready for.
_MESSAGE, _MAX_SENDING, _NUM_EXPECTED = 1 << 16, 64, 4

# Renamed in torch 2.13, which warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Collective = Callable[[torch.Tensor], torch.Tensor]
_Messages = deque[tuple[dist.Work | None, torch.Tensor]]


class Group:
    """Some of an engine's ranks, which are connected once they have joined. Before that (in the
    warm-up step), or with one rank, collectives change nothing. Later they raise RanksLostError if
    another rank is lost."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank  # among them
        self.size = size
        self.waiting = False  # whether a collective on a CPU is waiting for the other ranks
        self.waited_s = 0.0  # so far, in collectives on a CPU
        # While a model is traced: notes down a layer's collective instead of doing it.
        self.defer: Callable[[Collective, torch.Tensor], torch.Tensor] | None = None
        self._joined = False

    def leave(self) -> None:
        """Notes that the ranks are not connected any more."""
        self._joined = False

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self.waiting = True
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise RanksLostError(str(error)) from error
        finally:
            self.waiting = False
            self.waited_s += time.monotonic() - began


class TensorParallel(Group):
    """One rank's view of the ranks that share each layer of its stage. The layers that need it get
    it.

    Args:
        in_order: whether the parts of ranks are added in one order.
    """

    def __init__(self, rank: int = 0, size: int = 1, in_order: bool = False) -> None:
        super().__init__(rank, size)
        self._in_order = in_order
        self._group: dist.ProcessGroup | None = None  # None: all ranks of the engine

    def join(self, group: dist.ProcessGroup | None) -> None:
        """Uses the connections of `group`."""
        self._group = group
        self._joined = self.size > 1

    def leave(self) -> None:
        super().leave()
        self._group = None  # its connections close with the last reference to it

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
                dist.all_reduce(x, group=self._group)
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Takes the maximum of `x` over the ranks, element by element, in place."""
        if self._joined:
            with self._collective():
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank -> [size, ...], equal on all ranks."""
        if not self._joined:
            return x.unsqueeze(0).expand(self.size, *x.shape)
        gathered = x.new_empty(self.size, *x.shape)
        with self._collective():
            _all_gather_single(gathered.view(-1), x.contiguous().view(-1), group=self._group)
        return gathered


class Pipeline(Group):
    """One rank's view of the stages, each of which has some of the layers. Hidden states pass from
    each stage to the next, where the rank with the same part of each layer gets them."""

    def __init__(self, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__(stage, num_stages)
        self._ranks_per_stage, self._tensor_rank = 1, 0
        # The maximum wait for another stage in a step: the stages before may each have to run one.
        self.timeout = num_stages * COLLECTIVE_TIMEOUT
        # Messages that are being sent, and buffers for those that may come, oldest first.
        self._sending: _Messages = deque()
        self._receiving: _Messages = deque()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def join(self, tensor: TensorParallel) -> None:
        """Uses the connections of all ranks of the engine. `tensor` are those of this stage."""
        self._ranks_per_stage, self._tensor_rank = tensor.size, tensor.rank
        self._joined = self.size > 1

    def leave(self) -> None:
        super().leave()
        self._sending.clear()
        self._receiving.clear()

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Waits for the hidden states [T, hidden] of the stage before, and writes them to `x`."""
        if self.defer is not None:
            return self.defer(self.receive, x)
        if not self._joined:
            return x.zero_()
        self._receive(x)
        return x

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Sends hidden states [T, hidden] to the stage after -> `x`. It waits only if many messages
        are on their way."""
        if self.defer is not None:
            return self.defer(self.send, x)
        if self._joined:
            self._send(x if x.is_cuda else x.flatten().clone())  # the next step overwrites x
        return x

    def _receive(self, x: torch.Tensor) -> None:
        source = self._rank_of(self.rank - 1)
        if x.is_cuda:
            with self._collective():
                dist.recv(x, source)
            return
        for piece in x.view(-1).split(_MESSAGE):
            # Gloo sends what is expected already without asking first.
            while len(self._receiving) < _NUM_EXPECTED:
                buffer = x.new_empty(_MESSAGE)
                with self._collective():
                    self._receiving.append((dist.irecv(buffer, source), buffer))
            piece.copy_(self._oldest(self._receiving)[: len(piece)])

    def _send(self, x: torch.Tensor) -> None:
        target = self._rank_of(self.rank + 1)
        if x.is_cuda:  # the stream waits, not this thread
            with self._collective():
                dist.send(x, target)
            return
        while len(self._sending) >= _MAX_SENDING:
            self._oldest(self._sending)
        for piece in x.split(_MESSAGE):
            with self._collective():
                self._sending.append((dist.isend(piece, target), piece))

    def _oldest(self, messages: _Messages) -> torch.Tensor:
        """Takes the oldest message once it has arrived."""
        work, message = messages.popleft()
        with self._collective():
            if work:
                work.wait(self.timeout)
        return message

    def _rank_of(self, stage: int) -> int:
        """The rank of the engine, at this one's place in another stage."""
        return stage * self._ranks_per_stage + self._tensor_rank


class Ranks:
    """One rank's view of its engine's ranks. Its own number is stage · tensor.size + tensor.rank.

    The connections are made anew in each epoch, so that a restarted rank can join the surviving
    ranks, whose weights stay loaded. With one rank, there are none.
    """

    def __init__(
        self, tensor: TensorParallel | None = None, pipeline: Pipeline | None = None
    ) -> None:
        self.tensor = tensor or TensorParallel()
        self.pipeline = pipeline or Pipeline()
        self.size = self.pipeline.size * self.tensor.size
        self._rank = self.pipeline.rank * self.tensor.size + self.tensor.rank
        self._store: TCPStore | None = None

    @property
    def groups(self) -> tuple[TensorParallel, Pipeline]:
        return self.tensor, self.pipeline

    @property
    def waiting(self) -> bool:
        """Whether a collective on a CPU is waiting for other ranks."""
        return any(group.waiting for group in self.groups)

    def join(
        self,
        epoch: int,
        device: torch.device,
        master_addr: str,
        master_port: int,
        superseded: Callable[[], bool],
    ) -> None:
        """Leaves the old connections and makes those of `epoch` with the other ranks, which must
        also call `join`. Rank 0 hosts the store through which they meet.

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
        _world.group_count = 0  # which names groups, and also counts attempts that failed
        if self._store is None or self._rank != 0:  # rank 0 may be new: connect again
            keep_to_interface_towards(master_addr, master_port)
            if self._rank != 0:
                wait_until(lambda: listens(master_addr, master_port), superseded)
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
            rank=self._rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT if on_gpu else CONNECT_TIMEOUT,
            device_id=device if on_gpu else None,  # connects now, not in the first collective
        )
        _set_pg_timeout(self.pipeline.timeout)
        self.tensor.join(self._group_of_stage())
        self.pipeline.join(self.tensor)

    def _group_of_stage(self) -> dist.ProcessGroup | None:
        """Connects the ranks of each stage -> this one's group, or None if it has all ranks."""
        own, size = None, self.tensor.size
        if size in (1, self.size):
            return None
        for first in range(0, self.size, size):  # each rank takes part in making all groups
            group = dist.new_group([*range(first, first + size)], timeout=CONNECT_TIMEOUT)
            if first <= self._rank < first + size:
                own = group
                _set_pg_timeout(COLLECTIVE_TIMEOUT, group)
        return own

    def _open_store(self, host: str, port: int) -> TCPStore:
        """Opens the store, which rank 0 serves to the other ranks. Rank 0 listens only on the
        address that `host` names; by default the store would listen on all addresses."""
        listener = at_first_address(host, port, listen) if self._rank == 0 else None
        return TCPStore(
            host,
            port,
            is_master=self._rank == 0,
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
        store.set(keys[self._rank], "")
        wait_until(lambda: store.check(keys), superseded)

    def leave(self) -> None:
        """Ends the connections, if any, even if a rank is lost. NCCL's kernels would wait for that
        rank forever, and only an abort makes them return. Graphs that use the connections must have
        been dropped: an abort waits for them, too (`commDestroySync` of NCCL's init.cc)."""
        for group in self.groups:
            group.leave()
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            _abort_process_group()
        else:
            dist.destroy_process_group()
