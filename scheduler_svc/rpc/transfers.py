"""The transfers of an epoch, which all ranks make in directories of their own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from scheduler_svc.core.blocks.block_names import NAME_BYTES
from scheduler_svc.core.swaps import TierContents, Transfer, TransferAnswer, TransferKind
from scheduler_svc.engine import WorkersLostError
from scheduler_svc.rpc.rank_stream import RankStream, together
from shared.pb import worker_pb2

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

Stream = RankStream[worker_pb2.TransferRequest, worker_pb2.TransferResponse]


class Transfers:
    """Loads have streams of their own, so that they do not wait for others. A block is copied if
    all ranks have copied it. `send` and `receive` raise WorkersLostError as their streams do."""

    def __init__(self, stubs: Seq[WorkerServiceAsyncStub], epoch: int) -> None:
        self._epoch = epoch
        self._loads: list[Stream] = [RankStream(stub.Transfer()) for stub in stubs]
        self._others: list[Stream] = [RankStream(stub.Transfer()) for stub in stubs]

    @property
    def streams(self) -> list[Stream]:
        return self._loads + self._others

    async def send(self, transfer: Transfer) -> None:
        """Has all ranks make a transfer."""
        request = worker_pb2.TransferRequest(
            epoch=self._epoch,
            transfer_id=transfer.number,
            kind=worker_pb2.TransferKind.ValueType(transfer.kind),
            names=b"".join(transfer.names),
            blocks=array("i", transfer.blocks).tobytes(),
        )
        streams = self._loads if transfer.kind is TransferKind.LOAD else self._others
        await together([stream.write(request) for stream in streams])

    async def receive(self, *, loads: bool) -> TransferAnswer | TierContents:
        """Returns the ranks' next answer to a load or to another transfer."""
        streams = self._loads if loads else self._others
        answers = await together([stream.read() for stream in streams])
        capacity = min(answer.capacity for answer in answers)
        if len({(answer.transfer_id, len(answer.done)) for answer in answers}) > 1:
            for stream in streams:
                stream.cancel()  # which is noticed as a loss
            raise WorkersLostError("ranks answer different transfers")
        if number := answers[0].transfer_id:
            done = [all(each) for each in zip(*(answer.done for answer in answers), strict=True)]
            seconds = max(answer.seconds for answer in answers)
            return TransferAnswer(number, done, seconds, capacity)
        names = [_split(answer.names) for answer in answers]
        common = set(names[0]).intersection(*names)
        orphans = set().union(*names) - common if capacity else ()
        return TierContents([name for name in names[0] if name in common], capacity, [*orphans])


def _split(names: bytes) -> list[bytes]:
    return [names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES)]
