"""Write a model with a choice in each slice for LMDeploy, which has this choice under the key router_n_groups.

LMDeploy 0.18.0 (lmdeploy/pytorch/backends/default/moe.py, DefaultSoftmaxTopKImpl) takes the softmax over all experts
and then the best top_k / router_n_groups experts of each of router_n_groups groups of neighbours. Its classes for
Mixtral, Qwen2-MoE and Qwen3-MoE read the key; their experts have no output scale. So the experts are written slice by
slice, and the scale is in their weights.

Transformers, vLLM and others ignore the key and would choose among all experts. So config.json names neither the model
type nor the architecture of the stock model: these engines refuse the folder. LMDeploy finds its class by the name in
auto_map, for which no file exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import export as exporting
from training.checkpoint.layout import Origin, Stored, opened, stored_slots
from training.parallel.processes import processes
from upcycle.arch import registry
from upcycle.arch.abilities import refusals
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.common import Target
from upcycle.arch.targets.upcycled import MODELING
from upcycle.converting import card
from upcycle.io.checkpoint import public_name
from upcycle.io.job import check_apart

MODEL_TYPE = "upcycled_lmdeploy"
ARCHITECTURE = "UpcycledForLMDeploy"
TARGETS = ("mixtral", "qwen3_moe", "qwen2_moe")


def export(source: str | Path, output: str | Path) -> Path:
    """Write the model in a folder or Hub id as a folder for LMDeploy."""
    folder = Path(output)
    if folder.exists():
        check_apart("output", folder, [source], "-lmdeploy")
    exporting.check_new(folder)
    with opened(source) as origin, processes("cpu"):
        target, moe = holder(origin)
        config = {
            **target.config(moe),
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURE],
            "auto_map": {"AutoModelForCausalLM": f"lmdeploy.{target.architecture}"},
            "router_n_groups": spec_of(origin).slices,
        }
        files = tuple(path for path in origin.files if path.name != MODELING.name)
        tensors = stored_slots(moe, target.slots(moe))
        made = replace(origin, spec=moe, tensors=tensors, config=config, files=files)
        base = list(origin.past.base)
        record = {
            "format": 1,
            "from": base[0] if base else "",
            "donors": base[1:],
            "source": list(origin.past.base.values()),
            "trained": list(origin.past.trained),
            "versions": card.versions(),
        }
        rows = [("from", public_name(str(source))), ("LMDeploy's class", target.architecture)]
        terms, names = origin.terms, [path.name for path in files]
        about = card.page("written for LMDeploy", rows, config, base, terms, ["moe", "upcycled"], names)
        return exporting.write(made, folder, lambda: Regrouped(origin, tensors), record, about)


def spec_of(origin: Origin) -> MoESpec:
    if not isinstance(origin.spec, MoESpec) or origin.config.get("model_type") != "upcycled":
        raise ValueError(
            f"the model is {origin.config.get('model_type')!r}, but engine=lmdeploy is for target=upcycled; LMDeploy "
            "reads its own architectures as they are, so give it the folder itself"
        )
    return origin.spec


def holder(origin: Origin) -> tuple[Target, MoESpec]:
    """Return the architecture of LMDeploy that can hold the model, and the model's spec there."""
    own = spec_of(origin)
    shared_gate = bool(own.shared)  # sigmoid(0) = 1/2 multiplies the shared expert, whose weights are doubled
    moe = replace(own, choice="any", output_scale=1.0, shared_gate=shared_gate)
    d = own.dense
    if own.slices == 1:
        raise ValueError(
            "the model's router chooses among all experts, and engine=lmdeploy is for a choice in each slice; "
            "convert with target=mixtral or another stock target"
        )
    reasons = [f"activation {d.activation!r}"] * (d.activation != "silu") + [f"norm {d.norm!r}"] * (d.norm != "rms")
    tried = {name: refusals(registry.readable(name).can, moe) for name in TARGETS}
    best = min(TARGETS, key=lambda name: len(tried[name]))
    reasons += [reason for reason in tried[best] if reason not in reasons]
    if reasons:
        raise ValueError(
            f"LMDeploy's {best} cannot hold this model, because it has {', '.join(reasons)}; serve the model with vLLM"
        )
    return registry.readable(best), moe


class Regrouped:
    """Reads the tensors of a model in the order and with the scale that LMDeploy wants."""

    def __init__(self, origin: Origin, tensors: Sequence[Stored]) -> None:
        self.origin, self.own = origin, spec_of(origin)
        self.names = {role: stored.name for stored in origin.tensors for role, _ in stored.roles}
        self.shapes = {role: stored.shape for stored in tensors for role, _ in stored.roles}
        experts = torch.arange(self.own.experts).view(-1, self.own.slices)  # expert e is in slice e % slices
        self.order: list[int] = experts.T.flatten().tolist()

    def role(self, role: str) -> Tensor:
        """Return the tensor of a role in LMDeploy's folder; zeros for what its class has and the model has not."""
        own = re.sub(r"(?<=\.experts\.)\d+", lambda found: str(self.order[int(found[0])]), role)
        if own not in self.names:
            return torch.zeros(self.shapes[role])
        tensor = self.origin.read(self.names[own])
        if role.endswith(".router.weight"):
            return tensor[self.order]
        if re.search(r"\.experts\.\d+\.down\.weight$", role):
            return tensor.double() * self.own.output_scale
        return tensor * 2 if role.endswith(".shared.down.weight") else tensor
