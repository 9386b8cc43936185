"""Adapters alone, as a folder that the library peft loads onto the model that they were trained on.

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)

A matrix that transformers holds as a module is one of target_modules, one that it holds as a bare parameter (routers,
stacked experts) one of target_parameters. Of two parameters of one module peft wraps the second around the first, whose
adapters then lie under `base_layer`. Stacked A are (N * rank, in), B (out, rank * N) with the expert last.

peft adapts the names that it finds and warns of the rest, so adapters of a mixture of experts would load onto the
attention of its dense base. A matrix that is named both as a module and as a parameter is an error where it is found;
DENSE is named so, which the dense base has and the mixture of experts has not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from training.checkpoint.export import Weights, provenance, unfinished
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

# targets whose experts transformers stacks as mlp.experts.gate_up_proj and down_proj, whatever they are called on disk
STACKED = ("glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe")
APART = ("upcycled",)  # whose modelling file has each expert's matrices as modules
WEIGHTS, ADAPTERS = "adapter_model.safetensors", "adapter_config.json"
DENSE = "model.layers.{}.mlp.down_proj"
Adapter = tuple[str, bool, Tensor, Tensor]  # what it is for, whether that is a bare parameter; A and B as peft has them


def check_peft(lora: LoraConfig, origin: Origin) -> None:
    """Raises a ValueError if the adapters of this model have no such folder."""
    if not lora.export:
        return
    kind = str(origin.config.get("model_type"))
    if isinstance(origin.spec, MoESpec) and kind not in (*STACKED, *APART):
        raise ValueError(
            f"lora.export knows the modules of {', '.join((*STACKED, *APART))}, and this model is {kind}; write "
            "export=FOLDER, which has the adapters merged"
        )
    if any(len(stored.roles) > 1 and stored.roles[0][1] for stored in origin.tensors):
        raise ValueError(
            f"lora.export has no place for adapters of matrices that {kind} holds in one; write export=FOLDER, which "
            "has the adapters merged"
        )


def write(weights: Weights, origin: Origin, lora: LoraConfig, facts: card.Training) -> None:
    """Write the folder lora.export; all ranks call this, and the first one writes."""
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
    if isinstance(origin.spec, MoESpec):
        refused = DENSE.format(origin.spec.layers[0])
        modules, parameters = [*modules, refused], [*parameters, f"{refused}.weight"]
    start = origin.past.start  # none where the model was made as it loaded
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
    """Return all adapters of the model."""
    model, whole = weights.model, weights.whole
    stacked = origin.config.get("model_type") in STACKED
    names = {role: stored.name.removesuffix(".weight") for stored in origin.tensors for role, _ in stored.roles}
    for name, module in adaptable(model):
        role = name.replace(".attention.", ".").replace(".ffn.", ".")
        if not module.low:
            continue
        if isinstance(module, Linear | Router):
            path = in_transformers(names[f"{role}.weight"])
            # in a stacked model peft takes any module called gate_proj for an expert of an older transformers
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


def in_transformers(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's, on disk
