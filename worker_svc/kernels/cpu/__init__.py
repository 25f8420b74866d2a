"""Kernels for CPUs: the C++ library `native`, and what calls it."""
