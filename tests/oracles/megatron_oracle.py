"""NVIDIA's upcycling, run as it is: megatron-core's public `upcycle_state_dict`, on a CPU, on weights we choose.

Runs in the environment of `make oracles` and knows nothing of this project:

    python megatron_oracle.py JOBS.json

JOBS.json is a list of objects (one process for all, because importing Megatron takes longer than the work):

    dense        a safetensors file with layers.L.{gate,up,down}.weight; no gate if the FFN has none
    out          the file to write: layers.L.experts.I.{fc1,fc2}.weight and layers.L.router.weight, as Megatron made them
    activation   swiglu | relu2 | gelu | geglu
    experts, granularity, top_k, pre_softmax      pre_softmax: softmax, then top-k, and no renormalisation
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

# Megatron makes a stream when it is imported, which a torch without CUDA cannot.
torch.cuda.Stream = type("Stream", (), {"__init__": lambda self, *args, **kwargs: None})  # type: ignore[misc]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

ACTIVATIONS = {"swiglu": functional.silu, "relu2": squared_relu, "gelu": functional.gelu, "geglu": functional.gelu}


def model(settings: dict[str, Any], moe: dict[str, Any]) -> Any:
    config = TransformerConfig(
        num_attention_heads=2, use_cpu_initialization=True, add_bias_linear=False, **(settings | moe)
    )
    spec = get_gpt_layer_local_spec(num_experts=moe.get("num_moe_experts"), moe_grouped_gemm=False)
    gpt = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=32, max_sequence_length=8)
    return gpt.to(config.params_dtype)


def upcycle(
    dense: dict[str, Tensor], *, activation: str, experts: int, granularity: int, top_k: int, pre_softmax: bool
) -> dict[str, Tensor]:
    hidden, ffn = dense["layers.0.down.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in dense)
    settings = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "activation_func": ACTIVATIONS[activation],
        "gated_linear_unit": "layers.0.gate.weight" in dense,
        "params_dtype": dense["layers.0.down.weight"].dtype,
    }
    moe = {
        "num_moe_experts": experts * granularity,
        "moe_ffn_hidden_size": ffn // granularity,
        "moe_router_topk": top_k,
        "moe_router_pre_softmax": pre_softmax,
    }
    small, large = model(settings, {}), model(settings, moe)
    for layer in range(layers):
        mlp, prefix = small.decoder.layers[layer].mlp, f"layers.{layer}"
        fc1 = [dense[f"{prefix}.{m}.weight"] for m in ("gate", "up") if f"{prefix}.{m}.weight" in dense]
        mlp.linear_fc1.weight.data.copy_(torch.cat(fc1))
        mlp.linear_fc2.weight.data.copy_(dense[f"{prefix}.down.weight"])
    made = upcycle_state_dict([large], [small])["model"]
    block = r"decoder\.layers\.(\d+)\.mlp"
    roles = {
        rf"{block}\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight": r"layers.\1.experts.\2.\3.weight",
        rf"{block}\.router\.weight": r"layers.\1.router.weight",
    }
    out = {}
    for name, tensor in made.items():
        for pattern, role in roles.items():
            if re.fullmatch(pattern, name):
                out[re.sub(pattern, role, name)] = tensor.detach().clone().contiguous()
    return out


def main(jobs: list[dict[str, Any]]) -> None:
    store = Path(tempfile.mkdtemp()) / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    for job in jobs:
        source, out = job.pop("dense"), job.pop("out")
        save_file(upcycle(load_file(source), **job), out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
