"""A driver whose figures can be worked out by hand: whatever is asked, tokens come 1 ms apart, the
first after 2 ms, or after as many as the entry's weights say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.metrics import Trace
from bench.peers.driver import Job, Server, main
from bench.workload import WorkloadRequest


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    weights = job.entry.weights
    if weights == "broken":
        raise RuntimeError("no such weights")
    first_s = 0.001 * int(weights) if weights.isdecimal() else 0.002
    missing = 1 if weights == "short" else 0

    def generate(requests: Sequence[WorkloadRequest]) -> list[Trace]:
        print("the server says something")
        return [
            Trace(
                len(each.prompt),
                sent=0.0,
                arrivals=[
                    (first_s + 0.001 * token, 1) for token in range(each.output_len - missing)
                ],
            )
            for each in requests
        ]

    yield Server(generate, {"fake": "1.0"}, {"model": job.model})
    os.write(1, b"and something more as it ends")


if __name__ == "__main__":
    main(serve)
