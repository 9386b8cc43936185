"""Export adapters as a folder that peft loads onto the model that they were trained on.

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)

Matrices that are modules in transformers are target_modules; bare parameters (routers, stacked experts) are
target_parameters. For two parameters of one module, peft wraps the second around the first, whose adapters then are
under `base_layer`. Stacked A are (N * rank, in), B (out, rank * N) with the expert last.

peft adapts the names that it finds and only warns about the rest, so adapters of an MoE would load onto the attention
of its dense base. A matrix that is named as a module and as a parameter is an error in peft. DENSE is named that way,
because the dense base has it and the MoE does not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from training.checkpoint.export import Weights, check_finite, provenance, unfinished
from training.checkpoint.layout import Origin
from training.model.layers import Linear
from training.model.lora import LoraConfig, adaptable
from training.model.moe import Router
from training.parallel.collectives import together
from training.parallel.processes import rank
from upcycle.arch.spec import MoESpec
from upcycle.converting import card
from upcycle.io import disk, publish
from upcycle.io.checkpoint import hub_match
from upcycle.io.job import JOB

# targets whose experts transformers stacks as mlp.experts.gate_up_proj and down_proj, whatever their names on disk
STACKED = ("glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe")
OURS = "upcycled"  # its modelling file stacks experts that fused kernels compute, and has those of others as modules
WEIGHTS, ADAPTERS = "adapter_model.safetensors", "adapter_config.json"
DENSE = "model.layers.{}.mlp.down_proj"
Adapter = tuple[str, bool, Tensor, Tensor]  # (target, whether it is a bare parameter, A, B), as peft stores them


def check_peft(lora: LoraConfig, origin: Origin) -> None:
    """Raise a ValueError if peft cannot hold the adapters of this model."""
    if not lora.export:
        return
    kind = str(origin.config.get("model_type"))
    if isinstance(origin.spec, MoESpec) and kind not in (*STACKED, OURS):
        raise ValueError(
            f"lora.export knows the modules of {', '.join((*STACKED, OURS))}, and this model is {kind}; write "
            "export=FOLDER, which has the adapters merged"
        )
    if any(len(stored.roles) > 1 and stored.roles[0][1] for stored in origin.tensors):
        raise ValueError(
            f"lora.export has no place for adapters of matrices that {kind} holds in one; write export=FOLDER, which "
            "has the adapters merged"
        )


def write(weights: Weights, origin: Origin, lora: LoraConfig, facts: card.Training) -> None:
    """Write the folder lora.export. All ranks call this; rank 0 writes."""
    with together("export the adapters"):
        if rank() == 0:
            write_folder(Path(lora.export), weights, origin, lora, facts)


def write_folder(folder: Path, weights: Weights, origin: Origin, lora: LoraConfig, facts: card.Training) -> None:
    tensors: dict[str, Tensor] = {}
    modules, parameters = list[str](), list[str]()
    for name, bare, a, b in adapters(weights, origin):
        (parameters if bare else modules).append(name)
        path = name.rpartition(".")[0] if bare else name
        if name.endswith(".gate_up_proj"):
            path += ".base_layer"
        for key, tensor in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{path}.{key}.weight"] = tensor.contiguous()
    check_finite(tensors)
    if isinstance(origin.spec, MoESpec):
        refused = DENSE.format(origin.spec.layers[0])
        modules, parameters = [*modules, refused], [*parameters, f"{refused}.weight"]
    start = origin.past.start  # empty if the model was upcycled while loading
    base, _, revision = start.partition("@") if hub_match(start) else (start, "", "")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "revision": revision or None, "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "inference_mode": True, "target_modules": modules,
        "target_parameters": parameters,
    }  # fmt: skip
    partial = folder.with_name(f"{folder.name}.partial")
    made = provenance(origin, facts) | ({} if origin.plan is None else {"plan": origin.plan.hash})
    with unfinished(partial, folder, [WEIGHTS, ADAPTERS, publish.MANIFEST]):
        disk.write_atomic(partial / WEIGHTS, save(tensors, {"format": "pt"}))
        disk.write_atomic(partial / ADAPTERS, json.dumps(config, indent=2).encode() + b"\n")
        files = publish.listed(partial / name for name in (WEIGHTS, ADAPTERS))
        disk.write_atomic(partial / publish.MANIFEST, publish.signed({**made, "files": files}))
        publish.rename(partial, folder)
        shutil.rmtree(folder / JOB, ignore_errors=True)


def adapters(weights: Weights, origin: Origin) -> Iterator[Adapter]:
    """Yield all adapters of the model."""
    model, whole = weights.model, weights.whole
    stacked = is_stacked(origin)
    names = {role: stored.name.removesuffix(".weight") for stored in origin.tensors for role, _ in stored.roles}
    for name, module in adaptable(model):
        role = name.replace(".attention.", ".").replace(".ffn.", ".")
        if not module.low:
            continue
        if isinstance(module, Linear | Router):
            path = in_transformers(names[f"{role}.weight"])
            # in a stacked model peft mistakes any module gate_proj for an expert of an older transformers
            bare = isinstance(module, Router) or (stacked and ".attention." not in name)
            yield f"{path}.weight" if bare else path, bare, whole(module.lora_a), whole(module.lora_b)
            continue
        up = whole(module.up_lora_a), whole(module.up_lora_b)
        down = whole(module.down_lora_a), whole(module.down_lora_b)
        if stacked:
            path = in_transformers(names[f"{role}.0.up.weight"]).rpartition(".experts.")[0] + ".experts"
            for key, (a, b) in (("gate_up_proj", up), ("down_proj", down)):
                yield f"{path}.{key}", True, a.mT.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            continue
        # each expert's matrices, without the padding of uneven ones; gate and up have the same A
        assert model.moe is not None
        halves = up[1].view(len(up[1]), *module.up.shape[1:3], -1)
        for i, width in enumerate(model.moe.widths):
            for half, matrix in enumerate(("gate", "up") if module.gated else ("up",)):
                yield names[f"{role}.{i}.{matrix}.weight"], False, up[0][i].T, halves[i, half, :width]
            yield names[f"{role}.{i}.down.weight"], False, down[0][i, :width].T, down[1][i]


def is_stacked(origin: Origin) -> bool:
    """Return whether transformers holds the experts of a layer in two parameters."""
    if origin.config.get("model_type") != OURS:
        return origin.config.get("model_type") in STACKED
    from upcycle.arch.remote.modeling_upcycled import UpcycledConfig  # imports transformers

    return bool(UpcycledConfig(**origin.config).has_stacked_experts)


def in_transformers(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's, on disk
