"""A worker process without a model, for measurements of the other services.

It serves `worker.proto` and checks nothing. It answers every step at once. With `--step-us` and
`--token-us` it waits as long as a step with that many tokens would take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from shared.process.death_signal import end_with_parent

VOCAB_SIZE = 32_000


class InstantWorker(WorkerServiceServicer):
    """The only rank of an engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._info = worker_pb2.GetInfoResponse(
            rank=0,
            world_size=1,
            device="none",
            dtype="none",
            model_fingerprint="instant",
            attention_backend="none",
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            max_model_len=options.max_model_len,
            vocab_size=VOCAB_SIZE,
            incarnation="instant",
            max_num_batched_tokens=2048,
        )
        self._step_s = options.step_us * 1e-6
        self._token_s = options.token_us * 1e-6

    def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        return self._info

    def Configure(
        self, request: worker_pb2.ConfigureRequest, context: object
    ) -> worker_pb2.ConfigureResponse:
        self._info.epoch = request.epoch
        return worker_pb2.ConfigureResponse()

    def Execute(
        self, request_iterator: Iterator[worker_pb2.StepRequest], context: object
    ) -> Iterator[worker_pb2.StepResponse]:
        done = 0.0  # end of the previous step; steps run one after another
        for step in request_iterator:
            if step.cut:  # all steps before it have been answered
                continue
            duration = self._step_s + self._token_s * (len(step.input_ids) // 4)
            # Every row gets the same token, or -1 if it samples nothing.
            token_ids = np.frombuffer(step.samples, "u1").astype("<i4") * 8 - 1
            for step_id in range(step.step_id, step.step_id + max(step.num_steps, 1)):
                if duration:
                    done = max(done, time.monotonic()) + duration
                    time.sleep(max(0.0, done - time.monotonic()))
                yield worker_pb2.StepResponse(
                    step_id=step_id, token_ids=token_ids.tobytes(), step_time_s=duration
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.instant_worker", description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16, help="tokens, %(default)s")
    parser.add_argument("--step-us", type=float, default=0.0, help="time per step, %(default)s")
    parser.add_argument(
        "--token-us", type=float, default=0.0, help="time per token in a step, %(default)s"
    )
    options = parser.parse_args()
    end_with_parent()
    # The server uses threads, because asyncio sleeps for whole milliseconds. A step may take less.
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    worker = InstantWorker(options)  # type: ignore[abstract]  # not asked
    add_WorkerServiceServicer_to_server(worker, server)
    server.add_insecure_port(options.address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
