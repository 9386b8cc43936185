"""Convert tokens per second to TFLOP/s and MFU, by the convention that makes published numbers comparable.

Count the forward and backward pass of matrices and of half-square causal attention; leave out router, norms and
recomputation (upcycle.planning.size has the formula). A card that is not in the table has no MFU, because a guess would
make a wrong number look right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from training.model.lora import is_adapter
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.planning.size import dense_flops, flops_per_token, moe_flops

# dense bf16, TFLOP/s; the value of the H100 is for the SXM board, because its PCIe and NVL boards are slower
PEAKS = {"H100": 989.5, "H200": 989.5, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0}
OTHER_BOARDS = {"H100": ("PCIE", "NVL")}


def model_flops(spec: DenseSpec | MoESpec, sequence: int, *, gated: bool | None = None) -> float:
    """Return the FLOPs of a token, forward and backward. `gated`: whether the FFNs have a gate, if they differ from the
    dense model."""
    if isinstance(spec, DenseSpec):
        return dense_flops(spec, sequence)
    return moe_flops(spec, sequence, gated=spec.dense.gated if gated is None else gated)


def spared_flops(model: nn.Module, spec: DenseSpec | MoESpec, sequence: int) -> float:
    """Return how many FLOPs of a token model_flops counts too many, because a part of the model is frozen, minus the
    FLOPs of its adapters. `model`: the whole model, with frozen parameters marked.

    A weight costs 6 FLOPs: 2 make the gradient of its matrix, and 2 pass a token's gradient on. Gradients are not
    passed on below the first layer that learns.
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
        elif "anchor" in words:
            continue  # kernels compute the gradients of all experts of a layer
        elif not parameter.requires_grad and multiplies(name, parameter, tied=dense.tied):
            at = place(name, dense.layers)  # an embedding that is also the head comes after all layers
            spared += 2 * each if not 0 <= at < first else 4 * each
    if first > 0 and dense.carried is None:
        windows = tuple(layer for layer in dense.window_layers if layer < first)
        spared += 4 / 6 * flops_per_token(replace(dense, layers=first, window_layers=windows), 0, sequence)
    elif first > 0:
        spared += 4 / 6 * flops_per_token(dense, 0, sequence) * first / dense.layers
    return spared


EMBEDDINGS = {"embed", "embed_tokens", "embeddings", "wte"}


def place(name: str, layers: int) -> int:
    """Return the layer of a parameter: -1 for an embedding, and `layers` for a parameter after all layers."""
    words = name.split(".")
    if "layers" in words:
        return int(words[words.index("layers") + 1])
    return -1 if EMBEDDINGS & set(words) else layers


def multiplies(name: str, parameter: nn.Parameter, *, tied: bool) -> bool:
    """Return whether a parameter is a matrix that model_flops counts. It does not count routers, gates of shared
    experts, and embeddings that are not also the head."""
    words = set(name.split("."))
    vector = parameter.ndim < 2 or name.endswith("bias") or len(parameter) == 1
    return not vector and "router" not in words and (tied or not EMBEDDINGS & words)


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device by its name (torch.cuda.get_device_name), or None if it is unknown."""
    words = device.upper().replace("-", " ").split()
    for name, peak in PEAKS.items():
        if name in words:  # compare whole words, because an H20 is not an H200
            return None if set(words) & set(OTHER_BOARDS.get(name, ())) else peak
    return None


@dataclass(frozen=True)
class Throughput:
    tokens_per_s: float  # of one GPU
    tflops: float  # of one GPU
    mfu: float | None  # 0 to 1; None if the device's peak is unknown


def throughput(flops_per_token: float, tokens_per_s: float, device: str) -> Throughput:
    """Return the throughput of one GPU from its tokens per second."""
    tflops = flops_per_token * tokens_per_s / 1e12
    peak = peak_tflops(device)
    return Throughput(tokens_per_s, tflops, None if peak is None else tflops / peak)
