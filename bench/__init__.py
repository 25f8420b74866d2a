"""Benchmarks of the stack through its public API. docs/results/index.md explains the figures."""

from worker_svc.devices.openmp import let_threads_spin_briefly

let_threads_spin_briefly()  # as in a worker, for models in this process
