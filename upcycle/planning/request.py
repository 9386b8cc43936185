"""Turn a config into a Method (`read_method`) and an MoESpec (`moe_spec`), checked against the dense model.

Every error names the nearest valid value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from upcycle import plugin
from upcycle.arch.spec import BYTES, MAX_EXPERTS, Choice, DenseSpec, MoESpec, Order
from upcycle.arch.targets import upcycled
from upcycle.config.schema import SizedConfig, UpcycleConfig
from upcycle.planning import methods, routers
from upcycle.planning.methods import Method, Sizes

SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
ALIGN = 16  # neurons: rows of a multiple of this are whole 16 bytes in any dtype, also if loaded in another one
WHOLE = SizedConfig()  # the default sizes for whole copies
SATURATED = 20.0  # largest standard deviation of logits: at 4 times this, a sigmoid is still above 0 in float32


def sized(config: UpcycleConfig) -> tuple[SizedConfig, str]:
    """Return the config with all sizes set, and a sentence that names the sizes set here."""
    name, keys = named_method(config)
    known = name in plugin.names(methods.__name__)  # grow.py has more methods, and read_method refuses unknown ones
    method = methods.load(name, keys) if known else methods.load("copy")
    choice = config.router.choice
    chooses_in_each = choice == "each-slice" or (choice == "auto" and config.target == "upcycled")
    slices = method.slices if chooses_in_each else 1
    granularity = config.granularity
    if granularity is None:
        divisor = math.gcd(slices, config.top_k or slices)  # so that a given top_k is a multiple of the granularity
        granularity = divisor if divisor > 1 else slices
    cut, part = granularity > 1, method.needs.part
    sizes = {
        "experts": 2 if part else 4 * granularity if cut and slices > 1 else len(config.donors) or WHOLE.experts,
        "granularity": granularity,
        "top_k": granularity if part or (cut and not method.needs.disjoint) else WHOLE.top_k,
    }
    left = {key: value for key, value in sizes.items() if getattr(config, key) is None}
    values = {field.name: getattr(config, field.name) for field in fields(config)} | left
    said = " ".join(f"{key}={value}" for key, value in left.items() if (key, value) != ("granularity", 1))
    if said and slices > 1 and [values[key] for key in sizes] == [4 * slices, slices, slices]:
        said += ", the recommended slices (docs/science.md)"
    elif said and method.slices > slices and "granularity" in left:
        said += " of whole copies, because only target=upcycled keeps slices together in training"
    return SizedConfig(**values), f"by default {said}" if said else ""


def named_method(config: UpcycleConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of the config's method, and the method's options."""
    if not isinstance(config.method, str | Mapping):
        raise ValueError(f"method is {config.method!r}; write for instance method.name=virtual_group")
    values = {"name": config.method} if isinstance(config.method, str) else dict(config.method)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"method.name is {name!r}; name one of {', '.join(plugin.names(methods.__name__))}")
    return name, values


def read_method(config: SizedConfig, donors: int) -> Method:
    """Return the config's method; raise a ValueError if its options or the number of donors are wrong."""
    method = methods.load(*named_method(config))
    method.options.check(Sizes(config.experts, config.granularity))
    check_donors(config, method, donors)
    return method


def check_donors(config: SizedConfig, method: Method, donors: int) -> None:
    name, needs = method.name, method.needs
    if needs.mixes and donors != config.experts:
        raise ValueError(
            f"{name} needs one donor per copy, got {donors} donors for experts={config.experts}; "
            f"list the models under `donors` or set experts={max(donors, 1)}"
        )
    if donors and not needs.mixes:
        raise ValueError(f"donors are given but method {name} uses only `source`; use method.name=branch_train_mix")
    if not config.source and "source" in (*needs.donors, needs.rest):
        what = f"method {name} takes FFNs" if "source" in needs.donors else "method.rest=base takes the rest"
        raise ValueError(f"{what} from `source`, which is not set; write source=FOLDER")


def layer_list(value: Any, layers: int) -> tuple[int, ...]:
    """Return the layers that `value` names: all | every:N (N-1, 2N-1, ...) | first-dense:K | a list."""
    want = "write all, every:2, first-dense:1 or a list like [1,3,5]"
    if isinstance(value, str):
        word, _, number = value.partition(":")
        n = int(number) if number.isdecimal() else -1
        if value == "all":
            chosen = range(layers)
        elif word == "every" and n > 0:
            chosen = range(n - 1, layers, n)
        elif word == "first-dense" and n >= 0:
            chosen = range(n, layers)
        else:
            raise ValueError(f"layers is {value!r}; {want}")
        if not chosen:
            raise ValueError(f"layers={value} selects none of the {layers} layers; {want}")
        return tuple(chosen)
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise ValueError(f"layers is {value!r}; {want}")
    wrong = [i for i in listed if not 0 <= i < layers]
    if wrong or len(set(listed)) != len(listed):
        raise ValueError(f"layers names {wrong or 'a layer twice'} of a model with layers 0 to {layers - 1}; {want}")
    return tuple(sorted(listed))


def moe_spec(config: SizedConfig, dense: DenseSpec, method: Method) -> MoESpec:
    """Return the MoESpec of a config; for impossible sizes raise a ValueError that names the nearest possible ones.

    With router.score=auto the MoESpec has softmax scores.
    """
    check_counts(config)
    dtype, disjoint = stated_dtype(config, dense), method.needs.disjoint
    shared = shared_neurons(config, dense, dtype, disjoint)
    widths = routed_widths(config, dense.ffn - shared, disjoint)
    padding = 0 if len(set(widths)) > 1 or whole_rows(widths[0], dtype) else -widths[0] % ALIGN
    shared_padding = padding * int(config.shared)  # each of several shared experts is as wide as a routed one
    choice = router_choice(config, method)
    parts = parts_of(config, method, choice)
    return MoESpec(
        dense=dense,
        layers=layer_list(config.layers, dense.layers),
        widths=tuple(width + padding for width in widths),
        top_k=config.top_k,
        copies=config.experts,
        granularity=config.granularity,
        shared=shared + shared_padding,
        score="sigmoid" if config.router.score == "sigmoid" else "softmax",
        order=cast(Order, config.router.order),
        normalize=config.router.normalize,
        choice=choice,
        dtype=dtype,
        disjoint=disjoint,
        equal=method.exact,
        padding=padding,
        shared_padding=shared_padding,
        parts=parts,
    )


def parts_of(config: SizedConfig, method: Method, choice: Choice) -> tuple[tuple[str, int], ...]:
    """Return the part that a method adds; raise a ValueError where an anchor could not keep the dense function."""
    if not method.needs.part:
        return ()
    each = choice == "each-slice" or config.granularity == 1
    if config.target != "upcycled" or not each or config.top_k != config.granularity:
        raise ValueError(
            f"method {method.name} chooses the anchor or a part's copy for each slice; write target=upcycled and leave "
            "router.choice and top_k out"
        )
    router = config.router
    if (router.score, router.order, router.normalize) != ("softmax", "softmax-then-topk", True):
        raise ValueError(f"method {method.name} needs the router's default score, order and normalize; leave them out")
    if config.shared:
        raise ValueError(f"shared is {config.shared:g}; method {method.name} keeps the whole FFN, so leave it out")
    return ((upcycled.check_name(method.needs.part), config.experts - 1),)


def check_counts(config: SizedConfig) -> None:
    total = config.experts * config.granularity
    if total > MAX_EXPERTS:
        raise ValueError(f"experts * granularity is {total}; a layer can have at most {MAX_EXPERTS} experts")
    if config.top_k > total:
        raise ValueError(
            f"top_k={config.top_k} is more than experts * granularity = {total}; top_k must be at most {total}"
        )


def stated_dtype(config: UpcycleConfig, dense: DenseSpec) -> str:
    dtype = config.dtype or dense.dtype
    if dtype not in BYTES:
        meant = f"; did you mean {SHORT[dtype]!r}?" if dtype in SHORT else plugin.nearest(dtype, list(BYTES))
        raise ValueError(f"dtype is {dtype!r}; write {', '.join(BYTES)}{meant}")
    return dtype


def shared_neurons(config: SizedConfig, dense: DenseSpec, dtype: str, disjoint: bool) -> int:
    """Return the number of neurons of the dense FFN that go to the shared expert."""
    g, asked = config.granularity, config.shared
    if not 0 <= asked < math.inf or (asked >= 1 and asked != int(asked)):
        raise ValueError(
            f"shared is {asked:g}; write a number of shared experts (0, 1, 2, ...) or a share of the FFN below 1"
        )
    if asked >= 1:
        return shared_experts(int(asked), dense.ffn, config.experts * g if disjoint else g)
    shared = round(asked * dense.ffn)
    if asked and not disjoint:
        shared -= (shared - dense.ffn) % g  # the remaining neurons must divide into g equal parts
        width = (dense.ffn - shared) // g
        if not whole_rows(width, dtype) and 0 < g * (fine := round(width / ALIGN) * ALIGN) < dense.ffn:
            shared = dense.ffn - g * fine  # the nearest share whose routed experts need no padding
    if asked and not 0 < shared < dense.ffn:
        raise ValueError(
            f"shared={asked:g} of {dense.ffn} neurons leaves no neurons for the shared or the routed experts; "
            "write for instance shared=0.25"
        )
    return shared


def shared_experts(count: int, neurons: int, parts: int) -> int:
    """Return the total neurons of `count` shared experts, each as wide as one of the `parts` routed experts."""
    if neurons % (parts + count):
        near = [s for s in range(1, 65) if neurons % (parts + s) == 0]
        raise ValueError(
            f"{neurons} neurons cannot be cut into {parts} routed and {count} shared parts of equal width; try shared="
            f"{', '.join(map(str, near[:4])) or '0.25'}, another granularity, or a share like shared=0.25"
        )
    return neurons // (parts + count) * count


def routed_widths(config: SizedConfig, routed: int, disjoint: bool) -> tuple[int, ...]:
    """Return the width of each routed expert, if `routed` neurons are divided among them."""
    g, total = config.granularity, config.experts * config.granularity
    if disjoint:
        if routed < total:
            raise ValueError(f"{routed} neurons cannot be split into {total} experts; lower experts or granularity")
        return tuple(routed // total + (i < routed % total) for i in range(total))
    if routed % g:
        near = sorted((n for n in range(1, routed + 1) if routed % n == 0), key=lambda n: abs(n - g))[:3]
        raise ValueError(
            f"granularity={g} must divide the {routed} neurons of the dense FFN; try "
            f"granularity={', '.join(map(str, sorted(near)))}"
        )
    return (routed // g,) * total


def router_choice(config: SizedConfig, method: Method) -> Choice:
    """Check the router's options; return the experts it chooses from: "any" or "each-slice"."""
    router, g, disjoint = config.router, config.granularity, method.needs.disjoint
    if router.score not in ("softmax", "sigmoid", "auto"):
        raise ValueError(f"router.score is {router.score!r}; write softmax, sigmoid or auto")
    if router.order not in ("softmax-then-topk", "topk-then-softmax"):
        raise ValueError(f"router.order is {router.order!r}; write softmax-then-topk or topk-then-softmax")
    choice = router.choice
    if choice not in ("auto", "any", "each-slice", "parts"):
        raise ValueError(f"router.choice is {choice!r}; write auto, any, each-slice or parts")
    if choice == "auto":
        choice = "each-slice" if config.target == "upcycled" and not disjoint else "any"
    if choice != "parts" and not disjoint and config.top_k % g:
        raise ValueError(
            f"top_k={config.top_k} is not a multiple of granularity={g}, so no choice is whole FFNs and the model "
            f"starts far from the dense one; try top_k={max(config.top_k // g, 1) * g}, or write router.choice=parts "
            "if you want that"
        )
    if choice == "each-slice" and disjoint:
        raise ValueError(
            f"router.choice=each-slice chooses among copies of a slice, and method {method.name} makes no copies; "
            "write router.choice=any"
        )
    return "each-slice" if choice == "each-slice" and g > 1 else "any"  # with one slice both mean the same


def whole_rows(width: int, dtype: str) -> bool:
    """Return True if a row of `width` numbers is a multiple of 16 bytes, as grouped kernels require."""
    return width * BYTES[dtype] % 16 == 0


def with_rows(config: SizedConfig, moe: MoESpec, *, text: bool) -> SizedConfig:
    """Return the config with router.init.name=auto resolved. `text`: True if there is text that it does not name."""
    if config.router.init.name != "auto":
        return config
    clusters = moe.slices > 1 and bool(text or config.calibration.texts)
    name = "parts" if moe.parts else "clusters" if clusters else "normal"
    init = replace(config.router.init, name=name)
    return replace(config, router=replace(config.router, init=init))


def check_router(config: UpcycleConfig, moe: MoESpec, kind: str | float) -> None:
    init = config.router.init
    if init.name not in routers.NAMES:
        raise ValueError(
            f"router.init.name is {init.name!r}; write "
            f"{', '.join(routers.NAMES)}{plugin.nearest(init.name, list(routers.NAMES))}"
        )
    spread = init.std * moe.dense.hidden**0.5
    if moe.score == "sigmoid" and spread > SATURATED:
        raise ValueError(
            f"router.init.std is {init.std:g}, which with hidden size {moe.dense.hidden} gives logits of about "
            f"{spread:.3g}, whose sigmoids are 0 or 1; write at most {SATURATED / moe.dense.hidden**0.5:.2g}, or "
            "router.score=softmax"
        )
    if init.name == "neurons" and not moe.disjoint:
        raise ValueError(
            "router.init.name=neurons needs method.name=split: only disjoint experts have neurons of their own"
        )
    if init.name == "clusters" and (moe.disjoint or moe.copies < 2):
        raise ValueError(
            "router.init.name=clusters divides text among copies, and this config makes no copies; write "
            "router.init.name=normal"
        )
    if (init.name == "parts") != bool(moe.parts):
        raise ValueError(
            f"router.init.name is {init.name}; parts is for method part, which has no other rows; leave it out"
        )
    if init.name == "hidden" and len(init.texts) != moe.copies:
        raise ValueError(
            f"router.init.name=hidden needs one text per copy in router.init.texts, got {len(init.texts)} for "
            f"experts={moe.copies}"
        )
    if init.name == "hidden" and moe.disjoint and moe.granularity > 1:
        raise ValueError("router.init.name=hidden with method.name=split needs granularity=1, one text per expert")
    if kind == "exact" and not moe.weights_sum_to_one:
        raise ValueError(
            "scale=exact is impossible with router.normalize=false: the gate weights then add up to a different "
            "number for every token; "
            "write router.normalize=true, scale=calibrated (measures the mean on calibration.texts), "
            "scale=published or a number"
        )


def measured_texts(config: UpcycleConfig) -> tuple[str, ...]:
    """Return the text files to measure on: router.init.texts if the rows need a text each, else calibration.texts."""
    return config.router.init.texts if config.router.init.name in routers.BY_TEXT else config.calibration.texts


def check_decoder(dense: DenseSpec) -> None:
    """Raise a ValueError if our own decoder, which runs the measurements on text, does not support the model."""
    if dense.carried is not None:
        raise ValueError(
            f"this config needs measurements on text, and our own decoder does not support {dense.family}; write "
            "scale=exact, router.init.name=normal and a method that measures nothing"
        )


def check_two(texts: Sequence[str]) -> None:
    """Raise a ValueError unless there are the two texts that a part's router rows are measured on."""
    if len(texts) != 2:
        raise ValueError(
            f"router.init.texts has {len(texts)} files; method part needs two: general text, which stays at the "
            "anchor, and the part's documents"
        )


def check_text(config: UpcycleConfig, kind: str | float, method: Method, folder: Path, *, text: bool) -> None:
    """Raise a ValueError unless there are text files to measure on and a tokenizer in the donor's `folder`.

    `text`: True if the caller has tokenized text that the config does not name.
    """
    init = config.router.init
    if init.name == "neurons" and not method.needs.order:
        raise ValueError("router.init.name=neurons needs method.by=activation, which finds the representative neurons")
    if init.name == "parts" and not text:
        check_two(init.texts)
    if not config.calibration.texts and init.name not in routers.BY_TEXT:
        if text:
            return
        what = "scale=calibrated" if kind == "calibrated" else method.needs.order or "router.init.name=clusters"
        raise ValueError(
            f"{what} is measured on text and calibration.texts is empty; name .txt, .jsonl or .jsonl.zst files"
        )
    if config.calibration.texts and init.name in routers.BY_TEXT:
        raise ValueError(
            f"with router.init.name={init.name} everything is measured on router.init.texts; leave calibration.texts "
            "out"
        )
    for path in measured_texts(config):
        if not Path(path).is_file():
            raise ValueError(f"text file {path} does not exist; name .txt, .jsonl or .jsonl.zst files")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which reading text needs; copy the model's tokenizer there")
