"""Confidence intervals of 95 %."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

Z = 1.959964
RESAMPLES = 2000


def paired_difference(
    right: NDArray[np.bool_], reference: NDArray[np.bool_]
) -> tuple[float, float]:
    """The interval of the difference between the shares of True in `right` and in `reference`,
    which answer the same questions [N]. Source: Bonett and Price, "Adjusted Wald confidence
    interval for a difference of binomial proportions based on paired data" (2012). Unlike a
    bootstrap's interval, it has a width even if no two answers differ."""
    count = len(right) + 2
    gained = (int((right & ~reference).sum()) + 1) / count
    lost = (int((~right & reference).sum()) + 1) / count
    half = Z * sqrt((gained + lost - (gained - lost) ** 2) / count)
    return gained - lost - half, gained - lost + half


def mean(sums: NDArray[np.float64], counts: NDArray[np.int64], seed: int) -> tuple[float, float]:
    """The interval of the mean of numbers from N texts, each text with a sum and a count [N]. The
    bounds are percentiles of the means of texts drawn again with replacement (Efron, 1979)."""
    drawn = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
