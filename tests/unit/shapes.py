"""Checkpoints as large as you like that take no disk: real safetensors headers, and data that is one hole of zeros."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from upcycle.io.checkpoint import DTYPES, INDEX

CODES = {torch_name: (code, bits) for code, (torch_name, bits) in DTYPES.items()}


def make_shaped(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    dtype: str = "bfloat16",
    shards: int = 1,
) -> Path:
    """A folder with these tensors, all zero, in `shards` sparse files of about equal size, in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    total = sum(prod(shape) for shape in tensors.values())
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    done = 0
    for name, shape in tensors.items():
        parts[min(done * shards // max(total, 1), shards - 1)][name] = shape
        done += prod(shape)
    files = (
        [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        if shards > 1
        else ["model.safetensors"]
    )
    for file, part in zip(files, parts, strict=True):
        write_sparse(folder / file, part, dtype)
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_sparse(file: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    code, bits = CODES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = prod(shape) * bits // 8
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the safetensors package aligns its data
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + at)


def llama_shapes(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """The tensors of an untied Llama; (80, 8192, 28672, 64, 8, 128256) is Llama 3 70B."""
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
            }.items()
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
