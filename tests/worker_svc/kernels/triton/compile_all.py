"""`python -m tests.worker_svc.kernels.triton.compile_all` compiles every kernel for sm_80 and
sm_90."""

from __future__ import annotations

import json
from dataclasses import asdict

from tests.worker_svc.kernels.triton import (
    compile_cases_attention,
    compile_cases_pointwise,
    compile_cases_products,
)
from tests.worker_svc.kernels.triton.compiled import compile_case

CASES = compile_cases_attention.CASES + compile_cases_pointwise.CASES + compile_cases_products.CASES
TARGETS = (80, 90)

if __name__ == "__main__":
    binaries = [
        binary
        for target in TARGETS
        for case in CASES
        if target >= case.first_target
        for binary in compile_case(case, target)
    ]
    print(json.dumps([asdict(binary) for binary in binaries]))
