"""A config's request as a Method (`read_method`) and an MoESpec (`moe_spec`), checked against the dense model.

Every refusal names the nearest value that would do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from upcycle import plugin
from upcycle.arch.spec import BYTES, MAX_EXPERTS, DenseSpec, MoESpec, Order
from upcycle.config.schema import UpcycleConfig
from upcycle.planning import methods, routers
from upcycle.planning.methods import Method, Sizes

SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
ALIGN = 16  # neurons: rows of a multiple are whole 16 bytes in any dtype, also one it is loaded in later
SATURATED = 20.0  # of the logits' standard deviation: at 4 of these a sigmoid is still above 0 in float32


def read_method(config: UpcycleConfig, donors: int) -> Method:
    if not isinstance(config.method, str | Mapping):
        raise ValueError(f"method is {config.method!r}; write for instance method.name=virtual_group")
    values = {"name": config.method} if isinstance(config.method, str) else dict(config.method)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"method.name is {name!r}; name one of {', '.join(plugin.names('upcycle.planning.methods'))}")
    method = methods.load(name, values)
    method.options.check(Sizes(config.experts, config.granularity))
    if method.needs.mixes and donors != config.experts:
        raise ValueError(
            f"{name} needs one donor per copy, got {donors} donors for experts={config.experts}; "
            f"list the models under `donors` or set experts={max(donors, 1)}"
        )
    if donors and not method.needs.mixes:
        raise ValueError(f"donors are given but method {name} has one source; use method.name=branch_train_mix")
    if not config.source and "source" in (*method.needs.donors, method.needs.rest):
        what = f"method {name} takes FFNs" if "source" in method.needs.donors else "method.rest=base takes the rest"
        raise ValueError(f"{what} from `source`, which is not set; write source=FOLDER")
    return method


def layer_list(value: Any, layers: int) -> tuple[int, ...]:
    """The layers that `value` names: all | every:N (N-1, 2N-1, ...) | first-dense:K | a list."""
    want = "write all, every:2, first-dense:1 or a list like [1,3,5]"
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str):
        word, _, number = value.partition(":")
        if value == "all":
            chosen = range(layers)
        elif word in ("every", "first-dense") and number.isdecimal() and (word == "first-dense" or int(number) > 0):
            n = int(number)
            chosen = range(n - 1, layers, n) if word == "every" else range(n, layers)
        else:
            raise ValueError(f"layers is {value!r}; {want}")
        if not chosen:
            raise ValueError(f"layers={value} leaves no layer of {layers} to convert; {want}")
        return tuple(chosen)
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    ):
        raise ValueError(f"layers is {value!r}; {want}")
    wrong = [i for i in value if not 0 <= i < layers]
    if wrong or len(set(value)) != len(value):
        raise ValueError(f"layers names {wrong or 'a layer twice'} of a model with layers 0 to {layers - 1}; {want}")
    return tuple(sorted(value))


def moe_spec(config: UpcycleConfig, dense: DenseSpec, method: Method) -> MoESpec:
    """The MoESpec of a config. Impossible sizes are a ValueError that names the nearest possible ones. Of
    router.score=auto it is the one with softmax scores."""
    for key in ("experts", "granularity", "top_k", "sequence"):
        if getattr(config, key) < 1:
            raise ValueError(f"{key} is {getattr(config, key)}; it must be at least 1")
    total, g = config.experts * config.granularity, config.granularity
    if total > MAX_EXPERTS:
        raise ValueError(f"experts * granularity is {total}; at most {MAX_EXPERTS} experts a layer are made")
    if config.top_k > total:
        raise ValueError(
            f"top_k={config.top_k} of experts * granularity = {total} experts; top_k must be at most {total}"
        )
    dtype = config.dtype or dense.dtype
    if dtype not in BYTES:
        meant = f"; did you mean {SHORT[dtype]!r}?" if dtype in SHORT else plugin.nearest(dtype, list(BYTES))
        raise ValueError(f"dtype is {dtype!r}; write {', '.join(BYTES)}{meant}")
    disjoint = method.needs.disjoint
    parts = total if disjoint else g
    if not 0 <= config.shared < math.inf or (config.shared >= 1 and config.shared != int(config.shared)):
        raise ValueError(
            f"shared is {config.shared:g}; write a number of shared experts (0, 1, 2, ...) or a share of the "
            "FFN below 1"
        )
    if config.shared >= 1:  # a number of experts, each of the routed width
        n = parts + int(config.shared)
        if dense.ffn % n:
            near = [s for s in range(1, 65) if dense.ffn % (parts + s) == 0]
            raise ValueError(
                f"{dense.ffn} neurons cannot be cut into {parts} routed and {config.shared:g} shared parts "
                "of one width; "
                f"try shared={', '.join(map(str, near[:4])) or '0.25'}, another granularity, or a share like "
                "shared=0.25"
            )
        shared = dense.ffn // n * int(config.shared)
    else:
        shared = round(config.shared * dense.ffn)
        if config.shared and not disjoint:
            shared -= (shared - dense.ffn) % g  # the remaining neurons must divide into g equal parts
            width = (dense.ffn - shared) // g
            if not whole_rows(width, dtype) and 0 < g * (fine := round(width / ALIGN) * ALIGN) < dense.ffn:
                shared = dense.ffn - g * fine  # the nearest share whose parts need no zeros
        if config.shared and not 0 < shared < dense.ffn:
            raise ValueError(
                f"shared={config.shared:g} of {dense.ffn} neurons leaves nothing shared or nothing routed; "
                "write for instance shared=0.25"
            )
    routed = dense.ffn - shared
    if disjoint:
        if routed < total:
            raise ValueError(f"{routed} neurons cannot be split into {total} experts; lower experts or granularity")
        widths = tuple(routed // total + (i < routed % total) for i in range(total))
    else:
        if routed % g:
            near = sorted((n for n in range(1, routed + 1) if routed % n == 0), key=lambda n: abs(n - g))[:3]
            raise ValueError(
                f"granularity={g} must divide the {routed} neurons of the dense FFN; try "
                f"granularity={', '.join(map(str, sorted(near)))}"
            )
        widths = (routed // g,) * total
    padding = 0 if len(set(widths)) > 1 or whole_rows(widths[0], dtype) else -widths[0] % ALIGN
    shared_padding = padding * int(config.shared)  # a number of shared experts is as wide as the routed ones
    if config.router.score not in ("softmax", "sigmoid", "auto"):
        raise ValueError(f"router.score is {config.router.score!r}; write softmax, sigmoid or auto")
    if config.router.order not in ("softmax-then-topk", "topk-then-softmax"):
        raise ValueError(f"router.order is {config.router.order!r}; write softmax-then-topk or topk-then-softmax")
    choice = config.router.choice
    if choice not in ("auto", "any", "each-slice", "parts"):
        raise ValueError(f"router.choice is {choice!r}; write auto, any, each-slice or parts")
    if choice == "auto":
        choice = "each-slice" if config.target == "upcycled" and not disjoint else "any"
    if choice != "parts" and not disjoint and config.top_k % g:
        raise ValueError(
            f"top_k={config.top_k} is not a multiple of granularity={g}, so no choice is whole FFNs and the model "
            f"starts far from the dense one; try top_k={max(config.top_k // g, 1) * g}, or if that is meant write "
            "router.choice=parts"
        )
    if choice == "each-slice" and disjoint:
        raise ValueError(
            f"router.choice=each-slice is a choice among copies of a slice, and method {method.name} makes no "
            "copies; write router.choice=any"
        )
    return MoESpec(
        dense=dense,
        layers=layer_list(config.layers, dense.layers),
        widths=tuple(width + padding for width in widths),
        top_k=config.top_k,
        copies=config.experts,
        granularity=g,
        shared=shared + shared_padding,
        score="sigmoid" if config.router.score == "sigmoid" else "softmax",
        order=cast(Order, config.router.order),
        normalize=config.router.normalize,
        choice="each-slice" if choice == "each-slice" and g > 1 else "any",  # G = 1: all are the same
        dtype=dtype,
        disjoint=disjoint,
        padding=padding,
        shared_padding=shared_padding,
    )


def whole_rows(width: int, dtype: str) -> bool:
    """True if rows of `width` numbers are whole 16 bytes, as grouped kernels want them."""
    return width * BYTES[dtype] % 16 == 0


def with_rows(config: UpcycleConfig, moe: MoESpec, *, text: bool) -> UpcycleConfig:
    """The config with the router's rows decided. `text`: whether there is some that it does not name."""
    if config.router.init.name != "auto":
        return config
    clusters = moe.slices > 1 and bool(text or config.calibration.texts)
    init = replace(config.router.init, name="clusters" if clusters else "normal")
    return replace(config, router=replace(config.router, init=init))


def check_router(config: UpcycleConfig, moe: MoESpec, kind: str | float) -> None:
    init = config.router.init
    if init.name not in routers.NAMES:
        raise ValueError(
            f"router.init.name is {init.name!r}; write "
            f"{', '.join(routers.NAMES)}{plugin.nearest(init.name, list(routers.NAMES))}"
        )
    if not 1e-6 <= init.std <= 1e3:
        raise ValueError(
            f"router.init.std is {init.std}; write 1e-6 to 1e3, because equal logits send every token to the "
            "same experts, and infinite ones nowhere"
        )
    spread = init.std * moe.dense.hidden**0.5
    if moe.score == "sigmoid" and spread > SATURATED:
        raise ValueError(
            f"router.init.std is {init.std:g}, which with hidden size {moe.dense.hidden} makes logits of about "
            f"{spread:.3g}, and their sigmoids 0 or 1; write at most {SATURATED / moe.dense.hidden**0.5:.2g}, or "
            "router.score=softmax"
        )
    if init.name == "neurons" and not moe.disjoint:
        raise ValueError(
            "router.init.name=neurons needs method.name=split: only disjoint experts have neurons of their own"
        )
    if init.name == "clusters" and (moe.disjoint or moe.copies < 2):
        raise ValueError(
            "router.init.name=clusters divides text among copies, and this config makes none; write "
            "router.init.name=normal"
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
            "scale=exact cannot hold with router.normalize=false: the chosen weights then add up to another "
            "number for every token; "
            "write router.normalize=true, scale=calibrated (measures the mean on calibration.texts), "
            "scale=published or a number"
        )


def measured_texts(config: UpcycleConfig) -> tuple[str, ...]:
    """The files that a pass over text reads: router.init.texts, one a domain, if the router needs them, and then for
    every other measurement too; else calibration.texts."""
    return config.router.init.texts if config.router.init.name == "hidden" else config.calibration.texts


def check_text(config: UpcycleConfig, kind: str | float, method: Method, folder: Path, *, text: bool) -> None:
    """Raise a ValueError unless there are text files to measure on and a tokenizer in the donor's `folder`. `text`:
    whether there is some that the config does not name, in ids."""
    init = config.router.init
    if init.name == "neurons" and not method.needs.order:
        raise ValueError("router.init.name=neurons needs method.by=activation, which finds the representative neurons")
    if not config.calibration.texts and init.name != "hidden":
        if text:
            return
        what = "scale=calibrated" if kind == "calibrated" else method.needs.order or "router.init.name=clusters"
        raise ValueError(
            f"{what} is measured on text and calibration.texts is empty; name .txt, .jsonl or .jsonl.zst files"
        )
    if config.calibration.texts and init.name == "hidden":
        raise ValueError(
            "with router.init.name=hidden everything is measured on router.init.texts; leave calibration.texts out"
        )
    if config.calibration.tokens < 1 or config.calibration.length < 1:
        raise ValueError("calibration.tokens and calibration.length must be at least 1")
    for path in measured_texts(config):
        if not Path(path).is_file():
            raise ValueError(f"text file {path} does not exist; name .txt, .jsonl or .jsonl.zst files")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which reading text needs; copy the model's tokenizer there")
