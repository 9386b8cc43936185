"""Write a Llama of any size with random weights, tensor by tensor, for the demo and the benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from upcycle.arch.families import llama
from upcycle.io import disk
from upcycle.planning import rng
from upcycle.planning.outputs import Output

# 1.1 B parameters: the shape of TinyLlama
TINYLLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
# 14 M parameters: converts and runs in seconds on a laptop
SMALL = TINYLLAMA | {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192,
}  # fmt: skip


def make_llama(folder: Path, config: Mapping[str, Any] = SMALL, *, seed: int = 0) -> Path:
    """Write a model that transformers can load into `folder`, and return `folder`.

    Each tensor draws from its own named generator.
    """
    full = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1, "eos_token_id": 2, **config,
    }  # fmt: skip
    spec = llama.FAMILY.read(full)
    names, dtype = llama.FAMILY.sources(spec), getattr(torch, spec.dtype)
    outputs = [(role, Output(names[role].name, shape, spec.dtype, ())) for role, shape in spec.roles()]
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    total = sum(output.bytes for _, output in outputs)
    with disk.Stream(part) as file, tqdm(total=total, unit="B", unit_scale=True, desc="dense", delay=2) as bar:
        file.write(disk.header(output for _, output in outputs))
        for role, output in outputs:
            if "norm" in role:
                tensor = 1 + 0.1 * rng.normal(output.shape, seed, role)
            else:
                # draw 64 MB of random numbers and repeat them, which is much faster for billions of weights
                drawn = rng.normal((min(prod(output.shape), 1 << 24),), seed, role)
                tensor = drawn.repeat(-(-prod(output.shape) // drawn.numel()))[: prod(output.shape)].view(output.shape)
                tensor = tensor * (output.shape[-1] ** -0.5 if role != "embed.weight" else 1.0)
            file.write(tensor.to(dtype))
            bar.update(output.bytes)
    (folder / "config.json").write_text(json.dumps(full, indent=2) + "\n")
    part.rename(folder / "model.safetensors")
    return folder
