"""Confidence intervals of 95 %."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

Z = 1.959964
RESAMPLES = 2000


def share(right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share (1927)."""
    center = (right + Z * Z / 2) / (count + Z * Z)
    half = Z * sqrt(right * (count - right) / count + Z * Z / 4) / (count + Z * Z)
    return center - half, center + half


def paired_difference(
    right: NDArray[np.bool_], reference: NDArray[np.bool_]
) -> tuple[float, float]:
    """The interval of the difference between the shares of True in `right` and in `reference`,
    which answer the same questions [N]: method 10 of Newcombe, "Improved confidence intervals for
    the difference between binomial proportions based on paired data" (1998). Unlike a bootstrap's,
    it has a width even where no two answers differ."""
    count = len(right)
    both, only_right = int((right & reference).sum()), int((right & ~reference).sum())
    only_reference = int((~right & reference).sum())
    neither = count - both - only_right - only_reference
    shares = (both + only_right) / count, (both + only_reference) / count
    (low, high), (reference_low, reference_high) = (
        share(each, count) for each in (both + only_right, both + only_reference)
    )
    margins = (both + only_right) * (only_reference + neither)
    margins *= (both + only_reference) * (only_right + neither)
    product = both * neither - only_right * only_reference
    corrected = max(product - count / 2, 0) if product > 0 else product
    correlation = corrected / sqrt(margins) if margins else 0.0

    def distance(one: float, other: float) -> float:
        return sqrt(max(one * one - 2 * correlation * one * other + other * other, 0))

    difference = shares[0] - shares[1]
    return (
        difference - distance(shares[0] - low, reference_high - shares[1]),
        difference + distance(high - shares[0], shares[1] - reference_low),
    )


def mean(sums: NDArray[np.float64], counts: NDArray[np.int64], seed: int) -> tuple[float, float]:
    """The interval of the mean of numbers that come in texts, each with a sum and a count [N]:
    percentiles of the means of texts drawn again, with replacement (Efron, 1979)."""
    drawn = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
