"""Adapters alone, as a folder that the library peft loads onto the model that they were trained on.

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)

A matrix that transformers holds as a module is one of target_modules, one that it holds as a bare parameter (routers,
stacked experts) one of target_parameters. Of two parameters of one module peft wraps the second around the first, whose
adapters then lie under `base_layer`. Stacked A are (N * rank, in), B (out, rank * N) with the expert last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from training.checkpoint.layout import Origin, full
from training.model.decoder import Decoder
from training.model.layers import Linear
from training.model.lora import LoraConfig, adaptable
from training.model.moe import Experts, Router
from training.parallel.collectives import gather
from training.parallel.mesh import ParallelMesh
from upcycle.arch.spec import MoESpec
from upcycle.io import disk, publish

# targets whose experts transformers stacks as mlp.experts.gate_up_proj and down_proj, whatever they are called on disk
STACKED = ("glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe")
APART = ("upcycled",)  # whose modelling file has each expert's matrices as modules
Adapter = tuple[str, bool, Tensor, Tensor]  # what it is for, whether that is a bare parameter; A and B as peft has them


def check_peft(lora: LoraConfig, origin: Origin) -> None:
    """Raises a ValueError if the adapters of this model have no such folder."""
    if not lora.export:
        return
    if Path(lora.export).exists():
        raise ValueError(f"lora.export={lora.export} exists already; remove it or choose another folder")
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


def write(model: Decoder, origin: Origin, lora: LoraConfig, base: str, mesh: ParallelMesh) -> None:
    """Writes the folder lora.export; all ranks call this, and the first one writes."""
    tensors: dict[str, Tensor] = {}
    modules, parameters = list[str](), list[str]()
    for name, bare, a, b in adapters(model, origin):
        (parameters if bare else modules).append(name)
        path = name.rpartition(".")[0] if bare else name
        if name.endswith(".gate_up_proj"):
            path += ".base_layer"
        for key, tensor in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{path}.{key}.weight"] = tensor.cpu().contiguous()
    tensors, modules, parameters = of_all_stages(tensors, modules, parameters, mesh, next(model.parameters()).device)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None, "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "inference_mode": True, "target_modules": modules,
        "target_parameters": parameters,
    }  # fmt: skip
    if mesh.rank == 0:
        folder = Path(lora.export)
        partial = folder.with_name(f"{folder.name}.partial")
        disk.make_folder(partial)
        disk.write_atomic(partial / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
        disk.write_atomic(partial / "adapter_config.json", json.dumps(config, indent=2).encode() + b"\n")
        publish.rename(partial, folder)
    if mesh.world > 1:
        dist.barrier()


def of_all_stages(
    tensors: dict[str, Tensor], modules: list[str], parameters: list[str], mesh: ParallelMesh, device: torch.device
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """What the stages of a pipeline have, on all of its ranks."""
    group = mesh.group("pp")
    if group is None:
        return tensors, modules, parameters
    found = gather([{name: list(t.shape) for name, t in tensors.items()}, modules, parameters], group, device)
    whole = {}
    for stage, (shapes, _, _) in enumerate(found):
        for name, shape in shapes.items():
            tensor = tensors[name].to(device) if stage == mesh.index("pp") else torch.empty(shape, device=device)
            dist.broadcast(tensor, group=group, group_src=stage)
            whole[name] = tensor.cpu()
    return whole, [name for _, names, _ in found for name in names], [name for _, _, names in found for name in names]


def adapters(model: Decoder, origin: Origin) -> Iterator[Adapter]:
    """All that the model has; ranks gather them together, one module at a time."""
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
            name_there = f"{path}.weight" if bare else path
            yield name_there, bare, full(module.lora_a.detach()), full(module.lora_b.detach())
        else:
            found = of_experts(module)
            if stacked:
                path = in_transformers(names[f"{role}.0.up.weight"]).rpartition(".experts.")[0] + ".experts"
                for key, (a, b) in zip(("gate_up_proj", "down_proj"), found, strict=True):
                    yield f"{path}.{key}", True, a.mT.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            else:
                yield from one_by_one(model, module, found, names, role)


def of_experts(module: Experts) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(A, B) of up and of down, as they lie in the model."""
    up_a, up_b, down_a, down_b = (
        full(each.detach()) for each in (module.up_lora_a, module.up_lora_b, module.down_lora_a, module.down_lora_b)
    )
    return (up_a, up_b), (down_a, down_b)


def one_by_one(
    model: Decoder,
    module: Experts,
    found: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    names: dict[str, str],
    role: str,
) -> Iterator[Adapter]:
    """Each expert's matrices, without the padding of uneven ones; gate and up have the same A."""
    assert model.moe is not None
    (up_a, up_b), (down_a, down_b) = found
    halves = up_b.view(len(up_b), *module.up.shape[1:3], -1)
    for i, width in enumerate(model.moe.widths):
        for half, matrix in enumerate(("gate", "up") if module.gated else ("up",)):
            yield names[f"{role}.{i}.{matrix}.weight"], False, up_a[i].T, halves[i, half, :width]
        yield names[f"{role}.{i}.down.weight"], False, down_a[i, :width].T, down_b[i]


def in_transformers(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's, on disk
