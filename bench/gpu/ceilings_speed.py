"""Measures the GPU's maximum rates, before all other measurements."""

from __future__ import annotations

from bench.gpu.ceilings import bandwidth, matmul_rate
from bench.gpu.records import Report
from bench.gpu.setup import Setup


def measure_bandwidth(setup: Setup, report: Report) -> None:
    bandwidth(setup, report)


def measure_matrix_product(setup: Setup, report: Report) -> None:
    matmul_rate(setup, report)
