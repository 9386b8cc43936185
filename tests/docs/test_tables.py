"""Compare docs/supported.md's tables of families, targets and backends with the code.

python -m tests.docs.test_tables        writes all except the last again
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from tests.parity import tiny
from upcycle import plugin
from upcycle.arch import engines, registry, siblings
from upcycle.arch.abilities import Abilities, refusals
from upcycle.arch.spec import DenseSpec, MoESpec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supported.md"
TARGETS = plugin.names("upcycle.arch.targets")
# natives, and the configs of their shapes
SHAPES = {
    "deepseek_v3": ["bench-deepseek-v3"], "kimi_k2": ["bench-kimi-k2"],
    "gpt_oss": ["bench-gpt-oss-20b", "bench-gpt-oss-120b"], "olmoe": ["bench-olmoe"],
}  # fmt: skip
CALLED = {
    "llama": "llama (1 to 3.x)", "qwen2": "qwen2, 2.5", "nemotron": "nemotron (4, Minitron)", "gpt_neox": "gpt_neox (Pythia)",
    "gemma3_text": "gemma3_text (270M, 1B)", "granitemoehybrid": "granitemoehybrid (Granite 4, dense)",
    "qwen3_5": "qwen3_5 (with its image encoder)",
}  # fmt: skip


def abilities(target: str) -> Abilities:
    found: Abilities = registry.readable(target).can
    return found


def plain(family: str) -> DenseSpec:
    """A model of the family as it is by default."""
    settings = {k: v for k, v in (tiny.SIZES | tiny.OWN.get(family, {})).items() if k != "num_key_value_heads" or v}
    spec: DenseSpec = registry.family(family).read(AutoConfig.for_model(family, **settings).to_dict())
    return replace(spec, dtype="float32")


def upcycled(spec: DenseSpec, can: Abilities, shared: int = 0) -> MoESpec:
    """Four copies of two parts, top-4: exact."""
    return MoESpec(
        dense=spec,
        layers=tuple(range(spec.layers)),
        widths=((spec.ffn - shared) // 2,) * 8,
        top_k=4,
        copies=4,
        granularity=2,
        shared=shared,
        score="softmax" if "softmax" in can.scores else "sigmoid",
        output_scale=2.0 if can.output_scale else 1.0,
        dtype="float32",
    )


def held(spec: DenseSpec, target: str, shared: int = 0) -> bool:
    can = abilities(target)
    return not refusals(can, upcycled(spec, can, shared))


def families() -> str:
    """Stock architectures only; that `upcycled` holds everything is tested below."""
    lines = ["| dense family | copies and virtual groups, exactly | and a shared expert, exactly |", "|---|---|---|"]
    stock = [target for target in TARGETS if abilities(target).stock]
    for family in plugin.names("upcycle.arch.families"):
        spec = plain(family)
        columns = [[t for t in stock if held(spec, t, shared)] for shared in (0, spec.ffn // 3)]
        cells = [", ".join(f"`{target}`" for target in column) or "only `upcycled`" for column in columns]
        lines.append(f"| {CALLED.get(family, family)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


MIXED = {"none": "no", "first-dense": "the first ones", "any": "any"}


def targets() -> str:
    lines = [
        "| target | scores | router computes in | a scale goes into | layers left dense |",
        "|---|---|---|---|---|",
    ]
    for target in TARGETS:
        can = abilities(target)
        router = "float32" if can.router_fp32 else "the model's dtype"
        scale = "the model's output scale" if can.output_scale else "the weights"
        lines.append(f"| `{target}` | {' or '.join(sorted(can.scores))} | {router} | {scale} | {MIXED[can.mixed]} |")
    return "\n".join(lines)


SHARED = {"none": "no", "any": "any width", "multiple": "a multiple of the routed width", "same": "of the routed width"}


def pairs() -> str:
    lines = ["| dense family | becomes | scores | a shared expert | layers left dense |", "|---|---|---|---|---|"]
    for pair in siblings.PAIRS:
        can, called = pair.can, CALLED.get(pair.dense, pair.dense)
        scores = " or ".join(sorted(can.scores))
        lines.append(f"| {called} | `{pair.moe}` | {scores} | {SHARED[can.shared]} | {MIXED[can.mixed]} |")
    return "\n".join(lines)


def read_by(engine: str, target: str) -> str:
    """Return yes, no, a dash if it was not asked, or what the engine does not read right."""
    rows = [row for row in engines.table()["rows"] if row["target"] == target and engine in row["read"]]
    if not rows:
        return "–" if engine in engines.OWN_ONLY else "no"
    right = [row for row in rows if row["read"][engine] == engines.RIGHT and not row["trained"]]
    known = {ask for row in right for ask in row["asks"]}
    wrong = [row["asks"] for row in rows if row["read"][engine] != engines.RIGHT]
    blamed = dict.fromkeys(ask for asks in wrong for ask in asks if ask not in known)
    return ("no" if not known else f"not with {', '.join(blamed)}") if wrong else "yes"


def read() -> str:
    found = engines.table()["engines"]
    lines = [
        f"| target | {' | '.join(f'{name} ({version})' for name, version in found.items())} |",
        "|---" * (len(found) + 1) + "|",
    ]
    for target in TARGETS:
        lines.append(f"| `{target}` | {' | '.join(read_by(engine, target) for engine in found)} |")
    return "\n".join(lines)


def natives() -> str:
    """Of the shapes in configs/train/bench-NAME.yaml."""
    lines = ["| model_type | parameters, of a token | attention | experts |", "|---|---|---|---|"]
    for kind, shape in [(name, shape) for name in plugin.names("upcycle.arch.natives") for shape in SHAPES[name]]:
        keys = yaml.safe_load((ROOT / "configs" / "train" / f"{shape}.yaml").read_text())["architecture"]
        native = registry.native(kind)
        moe: MoESpec = native.read(keys)
        latent = moe.dense.latent
        sizes = [(slot.roles[0], prod(slot.shape)) for slot in native.slots(moe)]
        total, routed = sum(n for _, n in sizes), sum(n for role, n in sizes if ".experts." in role)
        used = total - routed + routed * moe.top_k // moe.experts
        groups = f", in {moe.group_top_k} of {moe.groups} groups" if moe.groups > 1 else ""
        attends = f"latents of {latent.kv_rank} + {latent.rope}" if latent else ""
        if moe.dense.sinks:
            attends = f"sinks, a window of {moe.dense.window} in {len(moe.dense.window_layers)} layers"
        attends = attends or f"q/k norm: {moe.dense.qk_norm}"
        experts = f"{moe.score}, top-{moe.top_k} of {moe.experts}{groups}"
        lines.append(f"| `{kind}` | {total / 1e9:.1f} B, {used / 1e9:.1f} B | {attends} | {experts} |")
    return "\n".join(lines)


TABLES = {"natives": natives, "families": families, "targets": targets, "siblings": pairs, "engines": read}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: .*? -->\n)(.*?)(?=\n?<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_what_the_code_says(name: str) -> None:
    found = between(name).search(PAGE.read_text())
    assert found
    assert found[2] == TABLES[name](), "docs/supported.md is out of date; run python -m tests.docs.test_tables"


def test_upcycled_holds_everything() -> None:
    for family in plugin.names("upcycle.arch.families"):
        spec = plain(family)
        assert held(spec, "upcycled") and held(spec, "upcycled", spec.ffn // 3), family


def test_every_backend_is_in_the_table() -> None:
    section = PAGE.read_text().split("## Backends")[1].split("\n## ")[0]
    named = set(re.findall(r"^\|[^|]*\| `(\w+)`", section, re.MULTILINE))
    here = {name for folder in ("experts", "dispatch") for name in plugin.names(f"training.{folder}")} - {"common"}
    assert named == here


def write() -> None:
    text = PAGE.read_text()
    for name, table in TABLES.items():
        found = between(name).search(text)
        assert found
        text = f"{text[: found.start(2)]}{table()}\n{text[found.end(2) :].lstrip(chr(10))}"
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
