"""The rotary frequencies of every rope_type; the parity tests compare them with those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from upcycle.arch.spec import DenseSpec

Rope = Mapping[str, Any]  # spec.DenseSpec.rope
# results of `frequencies` on their device: a step that copied them there would wait, and CUDA graphs cannot record that
KNOWN: dict[tuple[int, int, int, str, torch.device], tuple[Tensor, float]] = {}
MOST = 256  # entries of KNOWN; dynamic ropes add entries for each length


def frequencies(spec: DenseSpec, length: int, rope: Rope) -> tuple[Tensor, float]:
    """Return, for sequences of `length`, the frequency of each pair of rotated dimensions and the factor of cos and
    sin."""
    n = int(spec.rotary_dim * rope.get("partial_rotary_factor", 1.0))
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    stated: float | None = rope.get("factor")
    factor = stated if stated is not None else spec.context / original(rope) if kind in ("yarn", "longrope") else 1.0
    power = torch.arange(0, n, 2, dtype=torch.float32) / n
    if kind == "dynamic":  # the base grows with the length beyond the model's own context
        theta *= (factor * max(length, spec.context) / spec.context - (factor - 1)) ** (n / (n - 2))
    plain = 1.0 / theta**power
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return llama3(plain, rope, factor), 1.0
    if kind == "yarn":
        return yarn(theta, power, n, rope, factor)
    if kind == "longrope":
        stretch = torch.tensor(rope["long_factor" if length > original(rope) else "short_factor"], dtype=torch.float32)
        default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original(rope)))
        return 1.0 / (stretch * theta**power), float(rope.get("attention_factor") or default)
    assert kind in ("default", "dynamic"), kind
    return plain, 1.0


def original(rope: Rope) -> int:
    return int(rope["original_max_position_embeddings"])


def llama3(plain: Tensor, rope: Rope, factor: float) -> Tensor:
    """Return the frequencies with long waves stretched by `factor`, short waves kept, and others interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wave, context = 2 * math.pi / plain, original(rope)
    smooth = (context / wave - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    return torch.where(wave > context / low, plain / factor, torch.where(wave < context / high, plain, between))


def yarn(theta: float, power: Tensor, n: int, rope: Rope, factor: float) -> tuple[Tensor, float]:
    get = rope.get

    def dimension(rotations: float) -> float:
        return n * math.log(original(rope) / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = dimension(get("beta_fast") or 32), dimension(get("beta_slow") or 1)
    if get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    ramp = ((torch.arange(n // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    plain = 1.0 / theta**power
    attention = get("attention_factor")
    if attention is None:
        one, all_ = get("mscale"), get("mscale_all_dim")
        attention = mscale(one) / mscale(all_) if one and all_ else mscale(1.0)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def angles(
    spec: DenseSpec, positions_BS: Tensor, dtype: torch.dtype, length: int | None = None, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [B, S, 1, n / 2], computed in float32; `length` is the length of whole sequences."""
    rope, length = spec.rope if rope is None else rope, length or positions_BS.shape[1]
    key = spec.rotary_dim, spec.context, length, json.dumps(rope, sort_keys=True, default=str), positions_BS.device
    if key not in KNOWN:
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        plain, factor = frequencies(spec, length, rope)
        KNOWN[key] = plain.to(positions_BS.device), factor
    plain, factor = KNOWN[key]
    angle = (positions_BS[..., None].float() * plain)[:, :, None]
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
