"""Tokens per second -> TFLOP/s and MFU, by the one convention that makes published numbers comparable.

Forward and backward of matrices and half-square causal attention; router, norms and recomputation do not count
(upcycle.planning.size has the formula). A card that is not in the table has no MFU: a guess makes a wrong number look
right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from training.model.lora import is_adapter
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.planning.size import dense_flops, flops_per_token, moe_flops

# Dense bf16, TFLOP/s. The H100's is that of the SXM board; its PCIe and NVL boards are slower.
PEAKS = {"H100": 989.5, "H200": 989.5, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0}
OTHER_BOARDS = {"H100": ("PCIE", "NVL")}


def model_flops(spec: DenseSpec | MoESpec, sequence: int, *, gated: bool | None = None) -> float:
    """FLOPs a token, forward and backward. `gated`: as the FFNs are held, if not as in the dense model."""
    if isinstance(spec, DenseSpec):
        return dense_flops(spec, sequence)
    return moe_flops(spec, sequence, gated=spec.dense.gated if gated is None else gated)


def spared_flops(model: nn.Module, spec: DenseSpec | MoESpec, sequence: int) -> float:
    """FLOPs a token that model_flops counts and a model does not cost, because not all of it learns; less those of its
    adapters. `model`: the whole one, in which what does not learn is frozen.

    Of the 6 FLOPs a weight 2 make the gradient of a matrix, and 2 pass a token's gradient on; nothing is passed on
    below the first layer that learns.
    """
    dense = spec.dense if isinstance(spec, MoESpec) else spec
    first = min((place(name, dense.layers) for name, p in model.named_parameters() if p.requires_grad), default=0)
    spared = 0.0
    for name, parameter in model.named_parameters():
        words, each = name.split("."), float(parameter.numel())
        if "experts" in words and isinstance(spec, MoESpec):
            width = sum(spec.widths) / spec.experts if words[-1] in ("up", "down") else max(spec.widths)
            each *= spec.top_k / spec.experts * width / max(spec.widths)
        if is_adapter(words[-1]):
            spared -= 6 * each if "router" not in words else 0
        elif not parameter.requires_grad and multiplies(name, parameter, tied=dense.tied):
            at = place(name, dense.layers)  # of an embedding that is the head, after all layers
            spared += 2 * each if not 0 <= at < first else 4 * each
    if first > 0 and dense.carried is None:
        windows = tuple(layer for layer in dense.window_layers if layer < first)
        spared += 4 / 6 * flops_per_token(replace(dense, layers=first, window_layers=windows), 0, sequence)
    elif first > 0:
        spared += 4 / 6 * flops_per_token(dense, 0, sequence) * first / dense.layers
    return spared


EMBEDDINGS = {"embed", "embed_tokens", "embeddings", "wte"}


def place(name: str, layers: int) -> int:
    """The layer of a parameter; -1 of an embedding, and as many as there are of what comes after all layers."""
    words = name.split(".")
    if "layers" in words:
        return int(words[words.index("layers") + 1])
    return -1 if EMBEDDINGS & set(words) else layers


def multiplies(name: str, parameter: nn.Parameter, *, tied: bool) -> bool:
    """Whether a parameter is a matrix that model_flops counts: no router, no gate of a shared expert, no embedding
    unless it is the head too."""
    words = set(name.split("."))
    vector = parameter.ndim < 2 or name.endswith("bias") or len(parameter) == 1
    return not vector and "router" not in words and (tied or not EMBEDDINGS & words)


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
