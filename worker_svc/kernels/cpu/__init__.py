"""Kernels for CPUs, in numba."""
