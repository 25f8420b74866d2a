"""The random numbers for sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, a pure function of (seed, position).

    It takes two rounds of the SplitMix64 finalizer (Steele, Lea and Flood, "Fast Splittable
    Pseudorandom Number Generators", 2014). The first round hashes the seed, so that neighbouring
    seeds do not give equal numbers at neighbouring positions.
    """
    mixed = _splitmix64(_splitmix64(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
