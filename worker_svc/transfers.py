"""Decodes transfers of blocks, see `worker.proto`, and encodes their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from shared.errors import InvalidArgumentError
from shared.pb.worker_pb2 import (
    TRANSFER_KIND_ERASE,
    TRANSFER_KIND_LOAD,
    TRANSFER_KIND_SAVE,
    TransferRequest,
    TransferResponse,
)
from worker_svc.step.wire import INT32, check_length, check_range, decode_column
from worker_svc.tier.tier import Copied, Tier

_NAME_BYTES = 16


async def answer_transfers(
    requests: AsyncIterator[TransferRequest], tier: Tier, check_epoch: Callable[[int], object]
) -> AsyncIterator[TransferResponse]:
    """Yields the contents of the tier, then makes the transfers of a stream one after another.

    Args:
        check_epoch: raises an error if an epoch is not the current one.

    Raises:
        ServiceError: a request is malformed, or of another epoch.
    """
    names = b"".join(await tier.names())
    yield TransferResponse(names=names, capacity=tier.capacity)
    async for request in requests:
        check_epoch(request.epoch)
        done, seconds = await _make(request, tier)
        yield TransferResponse(
            transfer_id=request.transfer_id,
            done=bytes(done),
            seconds=seconds,
            capacity=tier.capacity,
        )


async def _make(request: TransferRequest, tier: Tier) -> Copied:
    names, blocks = request.names, decode_column("blocks", request.blocks, INT32)
    if len(names) % _NAME_BYTES:
        raise InvalidArgumentError("names", f"{len(names)} bytes, not {_NAME_BYTES} per block")
    split = [names[i : i + _NAME_BYTES] for i in range(0, len(names), _NAME_BYTES)]
    check_length("blocks", blocks, 0 if request.kind == TRANSFER_KIND_ERASE else len(split))
    check_range("blocks", blocks, 0, tier.num_blocks - 1)
    if request.kind == TRANSFER_KIND_ERASE:
        return await tier.erase(split)
    if request.kind == TRANSFER_KIND_SAVE:
        return await tier.save(split, blocks.tolist())
    if request.kind == TRANSFER_KIND_LOAD:
        return await tier.load(split, blocks.tolist())
    raise InvalidArgumentError("kind", f"{request.kind} is unknown")
