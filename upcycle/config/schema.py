"""The keys of an upcycling config, each with its default and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class RouterInit:
    # normal, virtual_group: rows from N(0, std), one for each copy | independent: one for each expert | clusters: text
    # in balanced clusters, one for each copy | hidden: means of hidden states, one text per copy | neurons: a
    # representative neuron each | auto: clusters where the router chooses in each slice and there is text
    # (calibration.texts; in training its own data will do), else normal
    name: str = "auto"
    # of the rows; 0.01 keeps the logits' own std below 1 up to H=8192; for hidden and neurons: of a row's elements; of
    # clusters it says nothing
    std: float = 0.01
    texts: tuple[str, ...] = ()  # hidden: one file per copy (a domain, or a donor's data)


@dataclass(frozen=True)
class Router:
    # what makes weights of logits: softmax | sigmoid | auto: softmax, or sigmoid where that alone keeps the model stock
    # and exact
    score: str = "softmax"
    order: str = "softmax-then-topk"  # softmax-then-topk | topk-then-softmax: over all experts, or over the chosen
    normalize: bool = True  # divide the chosen weights by their sum
    # any: the best top_k of all experts | each-slice: of each slice of the FFN the best top_k / granularity copies, so
    # that a token's choice is whole FFNs whatever the router learns; only target upcycled holds it | parts: as any, but
    # top_k may be no multiple of granularity: a choice is then parts of FFNs, and the start is not the dense model |
    # auto: each-slice for copies with target=upcycled, else any
    choice: str = "auto"
    init: RouterInit = field(default_factory=RouterInit)


@dataclass(frozen=True)
class Calibration:
    """Text for what is measured instead of assumed: scale=calibrated, router.init=clusters or hidden, split by
    activation. In training its own data is read where no texts are named."""

    texts: tuple[str, ...] = ()  # what is measured on: .txt, .jsonl or .jsonl.zst (key `text`)
    tokens: int = 8192  # how many of them are read
    sequence: int = 512  # tokens of one sequence; the model's context is the most

    ELSEWHERE: ClassVar = {"length": "calibration.sequence"}


@dataclass(frozen=True)
class UpcycleConfig:
    ELSEWHERE: ClassVar = {
        name: f"method.{name} (of a method that has it)" for name in ("ratio", "std", "mode", "by")
    } | dict.fromkeys(("model", "data", "steps"), "this in upcycle train or upcycle estimate, whose config this is")

    source: str = ""  # a folder or a hub id (org/name or org/name@revision)
    output: str = ""  # the folder to make
    target: str = "auto"  # an MoE architecture (upcycle/arch/targets), or auto
    donors: tuple[str, ...] = ()  # branch_train_mix: one dense model per copy; `source` gives the rest
    # E, a count: copies of every dense FFN, or of each expert of an MoE; with method prune or utility how many experts
    # a layer of an MoE has afterwards (in training, model.expert_backend names the kernels). null: 8; 4 * granularity
    # for method virtual_group where the router chooses in each slice
    experts: int | None = None
    # G: parts a copy is cut into; routed experts = experts * granularity. null: 1; 4 for method virtual_group where the
    # router chooses in each slice
    granularity: int | None = None
    top_k: int | None = None  # routed experts that a token takes. null: the granularity, or 2 of whole copies
    # 0 | n: n shared experts of the routed width | a fraction below 1: that share of the dense FFN's neurons
    shared: float = 0
    layers: Any = "all"  # all | every:N | first-dense:K | a list of layer numbers
    method: Any = field(default_factory=lambda: {"name": "copy"})  # name, and that method's own keys
    router: Router = field(default_factory=Router)
    scale: Any = "exact"  # of the experts' sum: exact | published | calibrated (measured on text) | none | a number
    scale_in: str = "auto"  # where the scale goes: auto (the target's output scale where it has one) | weights | output
    calibration: Calibration = field(default_factory=Calibration)
    dtype: str = ""  # of the result: bfloat16 | float16 | float32; "": the source's
    seed: int = 0  # of all that is drawn: router rows, noise, redrawn neurons, random splits
    max_shard: str = "5GB"  # bytes of a safetensors file at most: 5GB, 512MiB
    sequence: int = 4096  # tokens a sequence that FLOPs a token are counted for


@dataclass(frozen=True)
class SizedConfig(UpcycleConfig):
    """A config whose sizes are decided (upcycle.planning.request.sized)."""

    experts: int = 8
    granularity: int = 1
    top_k: int = 2


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that an older version stored, with the keys of today."""
    calibration = stored.get("calibration")
    if not isinstance(calibration, Mapping) or "length" not in calibration:
        return dict(stored)
    rest = {key: value for key, value in calibration.items() if key != "length"}
    return {**stored, "calibration": {**rest, "sequence": calibration["length"]}}
