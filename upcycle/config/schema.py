"""Define the keys of an upcycling config, with defaults and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from upcycle.config.values import LENGTH, TOKENS, Rule, at_least, check_values, finite, seed


@dataclass(frozen=True)
class RouterInit:
    # normal, virtual_group: random rows from N(0, std), one for each copy | independent: one for each expert |
    # clusters: balanced clusters of text, one for each copy | hidden: means of hidden states, one text per copy |
    # neurons: one representative neuron for each expert | parts: for method part | auto: clusters if the router chooses
    # in each slice and there is text (calibration.texts, or the training data), else normal
    name: str = "auto"
    # standard deviation of the rows; 0.01 keeps that of the logits below 1 up to a hidden size of 8192; for hidden and
    # neurons: of a row's elements; clusters ignores it
    std: float = 0.01
    # for hidden: one file per copy (a domain, or a donor's data); for parts: general text, and the part's
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        why = "because equal logits send every token to the same experts, and infinite logits cannot be routed"
        check_values(self, "router.init.", {"std": Rule(lambda std: 1e-6 <= std <= 1e3, f"write 1e-6 to 1e3, {why}")})


@dataclass(frozen=True)
class Router:
    # turns logits into weights: softmax | sigmoid | auto: softmax, or sigmoid if only that keeps the model stock and
    # exact
    score: str = "softmax"
    order: str = "softmax-then-topk"  # softmax-then-topk (over all experts) | topk-then-softmax (over the chosen)
    normalize: bool = True  # divide the chosen weights by their sum
    # any: the best top_k of all experts | each-slice: the best top_k / granularity copies of each slice of the FFN, so
    # that every choice is whole FFNs; only target upcycled can hold it | parts: like any, but top_k need not be a
    # multiple of the granularity, so a choice is parts of FFNs and the start is not the dense model | auto: each-slice
    # for copies with target=upcycled, else any
    choice: str = "auto"
    init: RouterInit = field(default_factory=RouterInit)


@dataclass(frozen=True)
class Calibration:
    """Text to measure on, for scale=calibrated, router.init=clusters or hidden, and split by activation. Training uses
    its own data if no texts are named."""

    texts: tuple[str, ...] = ()  # files to measure on: .txt, .jsonl or .jsonl.zst (key `text`)
    tokens: int = 8192  # tokens to read, from the starts of the files
    sequence: int = 512  # tokens of one sequence, at most the model's context

    ELSEWHERE: ClassVar = {"length": "calibration.sequence"}

    def __post_init__(self) -> None:
        check_values(self, "calibration.", {"tokens": at_least(1, most=TOKENS), "sequence": at_least(1, most=LENGTH)})


COPIES = "experts, the copies of each FFN; granularity cuts each copy into so many routed experts"


@dataclass(frozen=True)
class UpcycleConfig:
    ELSEWHERE: ClassVar = (
        {name: f"method.{name} (of a method that has it)" for name in ("ratio", "std", "mode", "by")}
        | dict.fromkeys(("model", "data", "steps"), "this in upcycle train or upcycle estimate, whose config this is")
        | dict.fromkeys(("copies", "num_experts", "num_local_experts", "n_routed_experts"), COPIES)
        | {"num_experts_per_tok": "top_k", "slices": "granularity, the slices of a copy"}
    )

    source: str = ""  # a folder or a Hub id (org/name or org/name@revision)
    output: str = ""  # the folder to make
    target: str = "auto"  # the MoE architecture (a file of upcycle/arch/targets), or auto
    donors: tuple[str, ...] = ()  # branch_train_mix: one dense model per copy; `source` gives the rest
    # E: copies of every dense FFN, or of each expert of an MoE; for method prune or utility the experts of a layer
    # afterwards. null: 8, or 4 * granularity for method virtual_group if the router chooses in each slice
    experts: int | None = None
    # G: parts that a copy is cut into; routed experts = experts * granularity. null: 1, or 4 for method virtual_group
    # if the router chooses in each slice
    granularity: int | None = None
    top_k: int | None = None  # routed experts per token. null: the granularity, or 2 for whole copies
    # 0 | n: n shared experts of the routed width | a fraction below 1: that share of the dense FFN's neurons
    shared: float = 0
    layers: Any = "all"  # all | every:N | first-dense:K | a list of layer numbers
    method: Any = field(default_factory=lambda: {"name": "copy"})  # name, and the keys of that method
    router: Router = field(default_factory=Router)
    # scale of the experts' sum: exact | published | calibrated (measured on text) | none | a number
    scale: Any = "exact"
    scale_in: str = "auto"  # where the scale goes: auto (the target's output scale where it has one) | weights | output
    calibration: Calibration = field(default_factory=Calibration)
    dtype: str = ""  # dtype of the result: bfloat16 | float16 | float32; "": the source's
    seed: int = 0  # seed of router rows, noise, redrawn neurons and random splits
    max_shard: str = "5GB"  # largest size of a safetensors file: 5GB, 512MiB
    sequence: int = 4096  # tokens of a sequence for which FLOPs per token are counted

    def __post_init__(self) -> None:
        rules = {"experts granularity top_k": at_least(1), "sequence": at_least(1, most=LENGTH), "seed": seed()}
        check_values(self, "", rules | {"shared": finite()})


@dataclass(frozen=True)
class SizedConfig(UpcycleConfig):
    """A config with all sizes decided (upcycle.planning.request.sized)."""

    experts: int = 8
    granularity: int = 1
    top_k: int = 2


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that an older version stored, with today's keys."""
    calibration = stored.get("calibration")
    if not isinstance(calibration, Mapping) or "length" not in calibration:
        return dict(stored)
    rest = {key: value for key, value in calibration.items() if key != "length"}
    return {**stored, "calibration": {**rest, "sequence": calibration["length"]}}
