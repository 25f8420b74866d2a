"""Checks the ranks of an engine against each other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

from shared.paging import Paging
from shared.pb import worker_pb2

_PAGING = [each.name for each in fields(Paging)]


class WorkerMismatchError(Exception):
    """The workers contradict each other or the settings; retrying cannot help."""


@dataclass(frozen=True)
class WorkerGroup:
    """The facts that all ranks agree on."""

    num_blocks: int  # what the rank with the least memory can hold
    paging: Paging
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int  # of a step
    epoch: int  # the highest that any rank has seen
    model_fingerprint: str
    drafts: bool  # whether they have a draft model
    has_tier: bool  # whether all ranks have a tier under the cache
    graph_tokens: int  # the maximum of prompt tokens in a step that runs from a CUDA graph
    num_stages: int  # of the pipeline


def agree(infos: Seq[worker_pb2.GetInfoResponse]) -> WorkerGroup:
    """Combines the ranks into a group with the smallest block count, length and limits of any.

    Raises:
        WorkerMismatchError: ranks are out of order or missing, or differ in what they have loaded.
    """
    for rank, info in enumerate(infos):
        if (info.rank, info.world_size) != (rank, len(infos)):
            raise WorkerMismatchError(
                f"worker_addresses: rank {rank} of {len(infos)} expected at place {rank}, "
                f"found rank {info.rank} of {info.world_size}"
            )
        names = "model_fingerprint", "dtype", "vocab_size", "drafts", "num_stages"
        for name in (*_PAGING, *names):
            if getattr(info, name) != getattr(infos[0], name):
                raise WorkerMismatchError(
                    f"{name}: {getattr(infos[0], name)} on rank 0, "
                    f"{getattr(info, name)} on rank {rank}"
                )
    return WorkerGroup(
        num_blocks=min(info.num_blocks for info in infos),
        paging=Paging(*(getattr(infos[0], name) for name in _PAGING)),
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=infos[0].vocab_size,
        max_num_batched_tokens=min(info.max_num_batched_tokens for info in infos),
        epoch=max(info.epoch for info in infos),
        model_fingerprint=infos[0].model_fingerprint,
        drafts=infos[0].drafts,
        has_tier=all(info.has_tier for info in infos),
        graph_tokens=min(info.graph_tokens for info in infos),
        num_stages=infos[0].num_stages,
    )
