"""The limits of grammars. How the numbers were found: docs/architecture.md, structured output."""

from __future__ import annotations

MAX_TEXT_BYTES = 64 << 10
# Of processor time, by the kernel's clock: the process is killed when it has used it up.
COMPILE_CPU_S = 20.0
MASK_CPU_S = 2.0  # for one mask, ...
TOKEN_CPU_S = 0.001  # ... and for each token that its matcher is told
# Of address space, beyond what the host has; allocations fail beyond it.
MEMORY_BYTES = 512 << 20

COMPILE_LIMITS = (
    f"needs more than {COMPILE_CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
)
MASK_LIMITS = (
    f"its mask needs more than {MASK_CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of "
    "memory"
)

MAX_COMPILING = 2  # at a time; and as many more to replace processes that died
MAX_PROCESSES = 64
MAX_BYTES = 1 << 30  # of all grammars' private memory when they were compiled

# A grammar that killed its process while it was compiled is refused for this long.
GUILTY_S = 300.0
MAX_GUILTY = 1024
