"""Services with faults, which `faulty_services/sitecustomize.py` describes."""

from __future__ import annotations

from pathlib import Path

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.faults.faulty_services.sitecustomize import TRIGGER
from tests.stack import ROOT


def request(first: int, *, trigger: bool = False) -> GenerateRequest:
    """A greedy request with a prompt of 40 tokens, the workers' trigger among them or not."""
    ids = [first, *range(100, 136), *(TRIGGER if trigger else (1500, 1500, 1501))]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=params)


def faulty_environment(**variables: str) -> dict[str, str]:
    """The environment of services with the faults that these variables name."""
    return {"PYTHONPATH": f"{Path(__file__).parent / 'faulty_services'}:{ROOT}", **variables}
