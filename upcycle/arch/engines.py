"""Say which engines read a plan's output correctly, from the results of tests/engines in engines.json.

An engine may ignore a key of config.json or assume a value for it. It then runs another model and says nothing. The
table has a row for each model that the tests made and ran. `asks` lists the features that a model needs from its
engine. An engine reads a plan correctly if it read every needed feature correctly in some row, and if no needed feature
is blamed for a row that it read wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from upcycle.arch import registry, siblings
from upcycle.arch.abilities import has_multipliers
from upcycle.arch.spec import MoESpec
from upcycle.io import strict

FILE = Path(__file__).with_name("engines.json")
RIGHT = "right"
FLAGS = {  # for a folder with its own code
    "transformers": "trust_remote_code=True",
    "vLLM": "--trust-remote-code",
    "SGLang": "--trust-remote-code",
}
OWN_ONLY = ("SGLang",)  # engines that were asked only about folders with their own code
# engines that may run a folder with its own code but need a GPU, which no test has -> what to do for them
NOT_ASKED = {
    "LMDeploy": "it needs a GPU; `upcycle export FOLDER OUTPUT engine=lmdeploy` writes its folder, or says why not"
}
# why some rows are wrong, from the engine's source code: (engine, target, the needed feature at fault) -> reason
BECAUSE: Mapping[tuple[str, str, str], str] = {
    (engine, target, ask): why for engine, target, ask, why in json.loads(FILE.with_name("because.json").read_text())
}


def asks(moe: MoESpec) -> tuple[str, ...]:
    """Return the features that the model needs from an engine, beyond a plain Llama with plain experts."""
    d = moe.dense
    asked = {
        "normalised weights": moe.weights_sum_to_one,
        "weights not normalised": not moe.weights_sum_to_one,
        "a choice in each slice": moe.slices > 1,
        "sigmoid scores": moe.score == "sigmoid",
        "experts of different widths": len(set(moe.widths)) > 1,
        "a shared expert": bool(moe.shared),
        "an output scale": moe.output_scale != 1.0,
        "dense layers": not moe.all_layers,
        "grouped-query attention": d.kv_heads != d.heads,
        "biases on q, k, v": d.qkv_bias,
        "a bias on attention's output": d.out_bias,
        "q/k norms": d.qk_norm != "none",
        "head_dim other than hidden/heads": d.head_dim * d.heads != d.hidden,
        "tied embeddings": d.tied,
        f"activation {d.activation}": d.activation != "silu",
        "FFNs without a gate": not d.gated,
        "biases in FFNs": d.ffn_bias,
        f"{d.block} blocks": d.block != "pre",
        f"norm {d.norm}": d.norm != "rms",
        "soft caps": bool(d.attention_cap or d.logit_cap),
        "layers without rotary embeddings": bool(d.nope_layers),
        "multipliers": has_multipliers(d),
        "sliding windows": bool(d.window_layers),
        f"rope {d.rope['rope_type']}": d.rope["rope_type"] != "default",
        "partial rotary": d.partial_rotary != 1.0,
    }
    return tuple(name for name, applies in asked.items() if applies)


@cache
def table() -> Mapping[str, Any]:
    return strict.read_object(FILE)


def fits(target: str, moe: MoESpec) -> tuple[list[str], list[str], list[str]]:
    """Return the engines that read the model correctly, then 'ENGINE: why not', then 'ENGINE: what was not tried'."""
    asked, right, wrong, untried = set(asks(moe)), ["transformers"], [], []
    for engine in table()["engines"]:
        if engine in OWN_ONLY and registry.readable(target).can.stock:
            continue
        rows = [row for row in table()["rows"] if row["target"] == target and engine in row["read"]]
        known = {ask for row in rows if row["read"][engine] == RIGHT and not row["trained"] for ask in row["asks"]}
        why = next(blamed(engine, target, rows, known, asked), "")
        if why:
            wrong.append(f"{engine}: {why}")
        elif asked <= known:
            right.append(engine)
        else:
            what = "this architecture" if not rows else ", ".join(ask for ask in asks(moe) if ask not in known)
            untried.append(f"{engine}: {what}")
    return right, wrong, untried


def blamed(
    engine: str, target: str, rows: Sequence[Mapping[str, Any]], known: set[str], asked: set[str]
) -> Iterator[str]:
    """Yield a reason for each row which shows that the engine cannot read a model with the features `asked`."""
    for row in rows:
        said = row["read"][engine]
        blame = [ask for ask in row["asks"] if ask not in known] or row["asks"]
        if said != RIGHT and asked & set(blame):
            because = [BECAUSE[engine, target, ask] for ask in blame if (engine, target, ask) in BECAUSE]
            yield (because or [said])[0]


def sentence(target: str, config: Mapping[str, Any]) -> str:
    """Return the plan's sentence on engines: 'transformers, vLLM; not MLX: ...; not tried: ...; not asked: ...'.

    It starts from config.json, because an engine sees only that.
    """
    if target in siblings.MOE:
        return "transformers; no other engine was tried"
    chosen = registry.readable(target)
    right, wrong, untried = fits(target, chosen.read(config))
    unasked = [] if chosen.can.stock else [f"{engine} ({why})" for engine, why in NOT_ASKED.items()]
    if not chosen.can.stock:  # the other engines have no class for it and do not run code from a folder
        right = [f"{engine} with {FLAGS[engine]}" for engine in right]
        untried = [what for what in untried if not what.endswith("this architecture")]
    parts = [", ".join(right), *(f"not {one}" for one in wrong)]
    for what, names in (("not tried", untried), ("not asked", unasked)):
        parts += [f"{what}: {', '.join(names)}"] if names else []
    return "; ".join(parts)
