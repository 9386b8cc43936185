"""Tokens per second -> TFLOP/s and MFU, by the one convention that makes published numbers comparable.

Forward and backward of matrices and half-square causal attention; router, norms and recomputation do not count
(upcycle.size has the formula). A card that is not in the table has no MFU: a guess makes a wrong number look right.
"""

from __future__ import annotations

from dataclasses import dataclass

from upcycle.size import dense_flops, moe_flops
from upcycle.spec import DenseSpec, MoESpec

# Dense bf16, TFLOP/s. The H100's is that of the SXM board; its PCIe and NVL boards are slower.
PEAKS = {"H100": 989.5, "H200": 989.5, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0}
OTHER_BOARDS = {"H100": ("PCIE", "NVL")}


def model_flops(spec: DenseSpec | MoESpec, sequence: int, *, gated: bool | None = None) -> float:
    """FLOPs a token, forward and backward. `gated`: as the FFNs are held, if not as in the dense model."""
    if isinstance(spec, DenseSpec):
        return dense_flops(spec, sequence)
    return moe_flops(spec, sequence, gated=spec.dense.gated if gated is None else gated)


def peak_tflops(device: str) -> float | None:
    """The peak of a device by its name (torch.cuda.get_device_name), or None if unknown."""
    words = device.upper().replace("-", " ").split()
    for name, peak in PEAKS.items():
        if name in words:  # whole words: an H20 is no H200
            return None if set(words) & set(OTHER_BOARDS.get(name, ())) else peak
    return None


@dataclass(frozen=True)
class Throughput:
    tokens_per_s: float  # of one GPU
    tflops: float  # of one GPU
    mfu: float | None  # 0 ... 1; None: the device's peak is unknown


def throughput(flops_per_token: float, tokens_per_s: float, device: str) -> Throughput:
    """`tokens_per_s`: of one GPU."""
    tflops = flops_per_token * tokens_per_s / 1e12
    peak = peak_tflops(device)
    return Throughput(tokens_per_s, tflops, None if peak is None else tflops / peak)
