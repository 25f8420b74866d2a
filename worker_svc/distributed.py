"""Tensor parallelism: the ranks of one model, and what they say to each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group

# A rank that waits longer than this for the others gives the step up.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# How long Configure waits for the other ranks.
JOIN_TIMEOUT = timedelta(seconds=30)


class TensorParallel:
    """One rank's view of its process group, passed to the layers that need it.

    The group is made anew in each epoch, so that a restarted rank can join the surviving ones,
    whose weights stay loaded. Outside a group (before the first `join`, in the warm-up step) and
    with one rank every collective is the identity.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._store: TCPStore | None = None
        self._joined = False

    def join(self, epoch: int, device: torch.device, master_addr: str, master_port: int) -> None:
        """Leaves the old group and makes the one of `epoch` with the other ranks, who must do the
        same. Rank 0 hosts the store at which they meet.

        Raises:
            RuntimeError: the others did not come within `JOIN_TIMEOUT` (`dist.DistError`).
        """
        if self.size == 1:
            return
        self.leave()
        if self._store is None or self.rank != 0:  # rank 0 may be a new process: dial it again
            self._store = TCPStore(
                master_addr,
                master_port,
                is_master=self.rank == 0,
                wait_for_workers=False,
                timeout=JOIN_TIMEOUT,
            )
        on_gpu = device.type == "cuda"
        # A rank whose peer is gone keeps its weights and comes to the next epoch: NCCL's watchdog
        # would end its process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(f"epoch-{epoch}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if on_gpu else None,  # connects now, not in the first collective
        )
        self._joined = True

    def leave(self) -> None:
        """Ends the current group, if any, even one in which a rank is gone: NCCL's kernels wait for
        it for ever, and only an abort makes them return."""
        if not self._joined:
            return
        self._joined = False
        if dist.get_backend() == "nccl":
            _abort_process_group()
        else:
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place."""
        if self._joined:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank -> [size, ...], equal on all ranks."""
        if not self._joined:
            return x.unsqueeze(0).expand(self.size, *x.shape)
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered
