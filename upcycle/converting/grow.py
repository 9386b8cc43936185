"""Change the number of experts of an MoE; each new expert is one of the source's experts.

copy     m copies of each expert. The copies share their router row, so the router takes all copies of the same k
         experts: top_k becomes m * k, each copy gets 1/m of its expert's weight, and the sum stays the same for every
         router whose weights are normalized over the chosen experts or are a softmax over all experts.
utility  more copies of experts that were chosen more often on text (published: 2604.19835); top_k stays. Copies that
         share a row would be chosen together: they would push out the k-th expert and get too much weight. A selection
         bias keeps the model exact: all copies except the first wait with a bias so low that no token takes them, until
         training moves the biases (balance.bias_rate). A softmax router has no selection bias, so it is refused.
prune    keep the experts with the largest saliency (REAP, 2510.13999): the mean, over the tokens that chose an expert,
         of its weight times the norm of its output. Not exact; the error is measured on the same text.

Every number of the result comes from the source, except the biases of waiting copies. The measurements on text come
from the file of `upcycle routing`, which names the model by its fingerprint.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from upcycle import plugin
from upcycle.arch.families.common import Source
from upcycle.arch.slots import Slot
from upcycle.arch.spec import MAX_EXPERTS, MoESpec
from upcycle.config.reading import build
from upcycle.config.schema import Router, SizedConfig, UpcycleConfig
from upcycle.io import strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.strict import Count
from upcycle.planning import methods, request
from upcycle.planning.methods import Method, Needs, Sizes

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys for the number of experts, by architecture
# keys of UpcycleConfig that only apply to dense FFNs, with the one value that an MoE source allows
ONLY: Mapping[str, Any] = {
    "granularity": 1, "shared": 0, "layers": "all", "scale": "exact", "donors": (), "target": "auto", "router": Router()
}  # fmt: skip
MARGIN = 1 / 16  # how far a waiting copy's bias is below the lowest that can be chosen, for float32 rounding


@dataclass(frozen=True)
class Measured:
    by: str = ""  # the file that `upcycle routing` wrote for the source: how often text used each expert

    def check(self, sizes: Sizes) -> None:
        if not self.by:
            raise ValueError(
                "method.by is empty; write the file that `upcycle routing SOURCE TEXT` makes, for instance "
                "method.by=routing.json"
            )


METHODS = {"prune": Measured, "utility": Measured}


class Layer(TypedDict):
    """The fields that are read for one layer in a file of `upcycle routing`."""

    layer: Count
    chosen: list[Count]  # for each expert: how many tokens took it
    saliency: list[float]  # for each expert: the mean of weight x norm of its output over these tokens
    bias: NotRequired[tuple[float, float]]  # the lowest and the highest selection bias, if there are any
    pruned: NotRequired[tuple[float, float, float]]  # error, gain, cosine of the FFN with `keep` experts


class Found(TypedDict):
    kind: Literal["routing"]
    source: str  # fingerprint of the measured model; "": a training run
    experts: Count
    keep: Count
    layers: list[Layer]


# ---- the config


def asked(config: UpcycleConfig) -> str:
    """Return the config's method if it is one of METHODS, else ""."""
    name = config.method.get("name") if isinstance(config.method, Mapping) else config.method
    return name if isinstance(name, str) and name in METHODS else ""


def check_dense(config: UpcycleConfig, source: Path) -> None:
    """Raise a ValueError if the config uses a method of METHODS with a dense source."""
    if asked(config):
        raise ValueError(
            f"method {asked(config)} needs a mixture of experts, and {source} is a dense model; write one of "
            f"{', '.join(plugin.names('upcycle.planning.methods'))}"
        )


def read_method(config: SizedConfig) -> Method:
    """Return the method that chooses the experts of an MoE source."""
    name = asked(config)
    if not name:
        return request.read_method(config, 0)
    values = config.method if isinstance(config.method, Mapping) else {}
    options = build(METHODS[name], {key: value for key, value in values.items() if key != "name"}, "method.")
    options.check(Sizes(config.experts, config.granularity))
    # no expert is computed from a dense FFN, so `make` is never called
    return Method(name, options, name == "utility", Needs(), methods.load("copy").make, None, "")


def check(config: SizedConfig, moe: MoESpec, name: str) -> None:
    """Raise a ValueError unless `config` can change the number of experts of `moe`."""
    other = [key for key, value in ONLY.items() if getattr(config, key) != value]
    method, already = read_method(config).name, "the source is a mixture of experts already"
    other += ["method"] if method not in ("copy", *METHODS) else []
    if name == "upcycled":
        raise ValueError(f"{already} (upcycled), and the number of experts can change only for stock architectures")
    if other:
        raise ValueError(
            f"{already} ({name}), whose experts can be copied (method.name=copy or utility) or pruned "
            f"(method.name=prune): leave {', '.join(other)} at the default"
        )
    if method == "copy":
        check_copies(config, moe, f"{already} ({name}, top-{moe.top_k} of {moe.experts})", name)
    else:
        check_count(config, moe, f"{already} ({name}, top-{moe.top_k} of {moe.experts})", method)


def check_copies(config: SizedConfig, moe: MoESpec, already: str, name: str) -> None:
    most = MAX_EXPERTS // moe.experts
    if not 1 <= config.experts <= most:
        raise ValueError(f"experts={config.experts} copies of each of {moe.experts} experts; write experts=1 to {most}")
    if config.top_k != moe.top_k * config.experts:
        raise ValueError(
            f"{already}; with {config.experts} copies of each expert, a token must take all copies of its experts, "
            f"so write top_k={moe.top_k * config.experts} (got {config.top_k})"
        )
    if not (moe.normalize or moe.score == "softmax"):
        raise ValueError(
            f"this {name} model has sigmoid scores that are not normalized (norm_topk_prob=false), so its copies would "
            "add up to too much; adding experts to it is not supported"
        )


def check_count(config: SizedConfig, moe: MoESpec, already: str, method: str) -> None:
    if method == "utility" and moe.score == "softmax":
        raise ValueError(
            f"{already}; unequal numbers of copies keep the function only with a selection bias, which its softmax "
            f"scores do not have; copy all experts equally: method.name=copy experts=2 top_k={2 * moe.top_k}"
        )
    low = max(moe.top_k, 1 if moe.score == "softmax" else 2)  # a sigmoid router adds the two best scores of a group
    low, high = (low, moe.experts - 1) if method == "prune" else (moe.experts + 1, MAX_EXPERTS)
    if not low <= config.experts <= high:
        raise ValueError(
            f"{already}; with method.name={method} `experts` is the new number of experts per layer: write "
            f"experts={low} to {high} (got {config.experts})"
            if low <= high
            else f"{already}; with fewer experts a token could not take {moe.top_k}, so none can be pruned"
        )
    if config.top_k != moe.top_k:
        raise ValueError(f"{already}, and top_k cannot change; write top_k={moe.top_k} (got {config.top_k})")


def grown_config(config: Mapping[str, Any], experts: int, top_k: int, dtype: str) -> dict[str, Any]:
    """Return the source's config.json with the new numbers of experts."""
    left_out = ("_name_or_path", "transformers_version", "torch_dtype", "auto_map")
    out: dict[str, Any] = {key: value for key, value in config.items() if key not in left_out}
    out |= {key: experts for key in COUNTS if config.get(key) is not None}
    return out | {"num_experts_per_tok": top_k, "dtype": dtype}


# ---- which experts


def choose(config: SizedConfig, moe: MoESpec, base: Checkpoint, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the experts that a method of METHODS chooses, from the measurement of the source; {} for other methods.

    layers.L.experts   for each expert, its index in the source; copies are adjacent
    layers.L.wait      the number that is subtracted from the bias of every copy except the first (utility)
    layers.L.pruned    error, gain and cosine of the FFN, if measured for this number of experts (prune)

    `known`: the result of an earlier plan, which is checked and returned instead.
    """
    method = read_method(config)
    if method.name not in METHODS:
        return {}
    if known:
        return checked(config, moe, method.name, known)
    file = Path(method.options.by)
    found: Found = strict.held(strict.read_json(file), Found, str(file))
    check_found(found, moe, base, file)
    out: dict[str, Tensor] = {}
    for row in found["layers"]:
        prefix = f"layers.{row['layer']}"
        if method.name == "prune":
            out[f"{prefix}.experts"] = torch.tensor(kept(row["saliency"], config.experts))
            if found["keep"] == config.experts and "pruned" in row:
                out[f"{prefix}.pruned"] = torch.tensor(row["pruned"], dtype=torch.float64)
        else:
            counts = torch.tensor(shares(row["chosen"], config.experts))
            out[f"{prefix}.experts"] = torch.arange(moe.experts).repeat_interleave(counts)
            low, high = row["bias"]
            out[f"{prefix}.wait"] = torch.tensor(1 + high - low + MARGIN, dtype=torch.float64)
    return checked(config, moe, method.name, out)


def check_found(found: Found, moe: MoESpec, base: Checkpoint, file: Path) -> None:
    """Raise a ValueError unless the file is a measurement of this model."""
    again = "run `upcycle routing` again on the folder of `source`"
    if found["source"] != base.fingerprint():
        what = "a training run (export it first)" if not found["source"] else "another model"
        raise ValueError(f"{file} was measured on {what}, not on {base.folder}; {again}")
    for row in found["layers"]:
        numbers = [*row["saliency"], *row.get("bias", ()), *row.get("pruned", ())]
        whole = len(row["chosen"]) == len(row["saliency"]) == moe.experts and all(map(math.isfinite, numbers))
        if not whole or ("bias" in row) != (moe.score == "sigmoid"):
            raise ValueError(f"{file} does not have the use of each of {moe.experts} experts; {again}")
    if [row["layer"] for row in found["layers"]] != list(moe.layers):
        raise ValueError(f"the layers of {file} are not the {len(moe.layers)} MoE layers of the source; {again}")


def checked(config: SizedConfig, moe: MoESpec, method: str, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of each layer; raise a ValueError unless they have the form that `choose` returns."""
    out: dict[str, Tensor] = {}
    for layer in moe.layers:
        name = f"layers.{layer}"
        experts, wait = known.get(f"{name}.experts"), known.get(f"{name}.wait")
        right = experts is not None and experts.shape == (config.experts,) and experts.dtype == torch.int64
        if right and experts is not None:
            # utility: every expert at least once; prune: no expert twice
            steps, every = experts.diff(), method == "utility"
            ends = int(experts[0]) >= 0 and int(experts[-1]) < moe.experts
            right = ends and bool((steps >= (0 if every else 1)).all())
            right = right and (not every or (len(set(experts.tolist())) == moe.experts and wait is not None))
            out[f"{name}.experts"] = experts
        if not right:
            raise ValueError(f"the measurement does not say which experts layer {layer} has; convert again")
        out |= {key: known[key] for key in (f"{name}.wait", f"{name}.pruned") if key in known}
    return out


def kept(saliency: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` experts with the largest saliency, in ascending order."""
    best = sorted(range(len(saliency)), key=lambda i: (-saliency[i], i))
    return sorted(best[:count])


def shares(use: Sequence[int], total: int) -> list[int]:
    """Return the copies of each expert, `total` in all; each extra copy goes to the expert with most use per copy."""
    copies = [1] * len(use)
    queue = [(-float(count), 1, i) for i, count in enumerate(use)]
    heapq.heapify(queue)
    for _ in range(total - len(use)):
        i = heapq.heappop(queue)[2]
        copies[i] += 1
        heapq.heappush(queue, (-use[i] / copies[i], copies[i], i))
    return copies


def cost(moe: MoESpec, experts: int, observed: Mapping[str, Tensor]) -> str:
    """Return a sentence on the cost of pruning. It is part of the promise, which manifests store: do not change it."""
    said = f"method prune keeps {experts} of {moe.experts} experts a layer"
    measured = [observed[name].tolist() for layer in moe.layers if (name := f"layers.{layer}.pruned") in observed]
    if not measured:
        return f"{said}; what that costs was not measured: `upcycle routing` with keep={experts} does"
    error, gain, cosine = (median(column) for column in zip(*measured, strict=True))
    return (
        f"{said}; measured of an FFN on that text: error {error:.2g}, gain {gain:.3g}, cosine {cosine:.3g} (median of "
        f"layers; the largest error is {max(row[0] for row in measured):.2g})"
    )


# ---- which tensors


class Experts:
    """The source's expert for each expert of the result, layer by layer."""

    def __init__(self, config: SizedConfig, moe: MoESpec, observed: Mapping[str, Tensor]) -> None:
        uniform = [i for i in range(moe.experts) for _ in range(config.experts)]
        self.of = {layer: observed[f"layers.{layer}.experts"].tolist() if observed else uniform for layer in moe.layers}
        self.wait = {
            layer: float(observed[name]) for layer in moe.layers if (name := f"layers.{layer}.wait") in observed
        }
        self.count, self.top_k = len(self.of[moe.layers[0]]), config.top_k

    def bias(self, layer: int, i: int) -> float:
        """Return the number that is added to the selection bias of expert i."""
        of = self.of[layer]
        return -self.wait.get(layer, 0.0) if i and of[i] == of[i - 1] else 0.0


class Part(NamedTuple):
    """A part of a tensor: its place in the source, its shape, its expert or -1, and a number to add."""

    source: Source
    shape: tuple[int, ...]
    expert: int = -1
    add: float = 0.0


def parts(slot: Slot, source: Mapping[str, Slot], experts: Experts) -> Iterator[Part]:
    """Yield the parts of a tensor of the new model; each expert's part comes from its expert in the source."""
    one = slot.roles[0].split(".")
    if len(slot.roles) == 1 and "experts" in one:
        role = ".".join([*one[:3], str(experts.of[int(one[1])][int(one[3])]), *one[4:]])
        yield Part(Source(source[role].name), slot.shape, int(one[3]))
    elif "experts" in one or one[2:3] == ["router"]:
        layer = int(one[1])
        for i, old in enumerate(experts.of[layer]):
            row = Source(source[slot.roles[0]].name, ((old, old + 1),))
            add = experts.bias(layer, i) if one[2:4] == ["router", "bias"] else 0.0
            yield Part(row, (1, *slot.shape[1:]), i if "experts" in one else -1, add)
    else:
        yield Part(Source(source[slot.roles[0]].name), slot.shape)


def check_source(slots: Mapping[str, Slot], checkpoint: Checkpoint) -> None:
    """Raise a ValueError unless the checkpoint has exactly the tensors that its config.json promises."""
    names = {slot.name: slot.shape for slot in slots.values()}
    for name, shape in names.items():
        entry = checkpoint.entries.get(name)
        if entry is None or entry.shape != shape:
            have = "no such tensor" if entry is None else f"shape {list(entry.shape)}"
            raise ValueError(
                f"config.json of {checkpoint.folder} promises {name!r} of shape {list(shape)}, but the files have "
                f"{have}; is the download complete?"
            )
    unknown = sorted(checkpoint.entries.keys() - names.keys())
    if unknown:
        raise ValueError(
            f"{checkpoint.folder} has a tensor {unknown[0]!r} that its config.json does not promise; converting "
            "would lose it"
        )
