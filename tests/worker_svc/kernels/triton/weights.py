"""Random quantized weights on the device under test."""

from __future__ import annotations

import torch

from tests.worker_svc.device import generator
from worker_svc.weights.quantization.formats import Format, QuantizedWeight


def random_weight(
    name: Format, out: int, columns: int, *, groups: int = 1, zeros: bool = False, seed: int = 0
) -> QuantizedWeight:
    """Codes of every value; scales that differ by a factor of up to 8, so that one that is out of
    place shows."""
    random = generator(seed)
    device = random.device

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=random, device=device)

    if name == "int4":
        codes = integers(0, 256, out, columns // 2).to(torch.uint8)
    elif name in ("int8", "int6"):
        top = 128 if name == "int8" else 32
        codes = integers(-top, top, out, columns).to(torch.int8)
    else:
        numbers = torch.randn(out, columns, generator=random, device=device)
        codes = (100 * numbers).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = 2 ** (3 * torch.rand(out, groups, generator=random, device=device) - 6)
    top = 16 if name == "int4" else 128
    shift = integers(top - 16, top, out, groups).to(torch.int16) if zeros else None
    return QuantizedWeight(name, codes, scales, shift)
