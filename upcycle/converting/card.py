"""Write a plan as text: the table of `upcycle plan` (`table`), and the model cards of converted (`text`), trained
(`trained`) and quantised (`quantised`) models."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from yaml import YAMLError

from upcycle.arch import engines
from upcycle.cli.frame import NEEDS, printable
from upcycle.io.checkpoint import public_name
from upcycle.io.strict import Count
from upcycle.planning import size
from upcycle.planning.plan import UpcyclePlan
from upcycle.planning.promise import Promise
from upcycle.version import __version__

MAX_CARD = 1 << 20  # bytes; the license of a larger card is not read
LICENSE = ("license", "license_name", "license_link")  # keys of a card's metadata


class Training(TypedDict):
    """One training run, as the manifest of a trained model records it."""

    start: NotRequired[str]  # the folder or hub id of the starting model, if not a base, and the sum of its manifest
    start_sum: NotRequired[str]
    steps: NotRequired[Count]
    tokens: NotRequired[Count]
    data: NotRequired[list[str]]
    losses: NotRequired[Mapping[str, tuple[float, float]]]  # first and last value
    scores: NotRequired[Mapping[str, float]]


class Measured(TypedDict):
    """The loss on a text before and after quantisation, in nats per token."""

    data: list[str]
    tokens: Count
    before: float
    after: float


def settings(plan: UpcyclePlan) -> dict[str, Any]:
    """Return the config with every default filled in."""
    return asdict(plan.config) | {"method": {"name": plan.method.name} | asdict(plan.method.options)}


def human(number: float, unit: str = "") -> str:
    for threshold, letter in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= threshold:
            return f"{number / threshold:.4g} {letter}{unit}"
    return f"{number:.4g} {unit}".rstrip()


def promised(plan: UpcyclePlan) -> dict[str, Any]:
    """Return the promise in the form that the manifest stores."""
    p = plan.promise
    return {"exact": p.exact, "tolerance": p.tolerance, "reasons": list(p.reasons)}


def promise_text(promise: Promise) -> str:
    if promise.exact:
        return "exact: the MoE computes what the dense model computes" + (
            f" ({'; '.join(promise.reasons)})" if promise.reasons else ""
        )
    text = f"not exact: {'; '.join(promise.reasons)}"
    if promise.estimate is not None:
        e = promise.estimate
        text += (
            f". Expected of one MoE block (Gaussian model, this router): error {e.error:.2g}, gain "
            f"{e.gain:.3g}, cosine {e.cosine:.3g}"
        )
    return text


def inert(text: str) -> str:
    """Escape a text for Markdown, so that it cannot add markup, HTML, pictures or lines."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", printable(text)).replace("<", "&lt;")


def rows(plan: UpcyclePlan) -> Iterator[tuple[str, str]]:
    moe, d, s, config = plan.moe, plan.dense, plan.sizes, plan.config
    widths = str(moe.widths[0]) if moe.uniform else f"{min(moe.widths)} to {max(moe.widths)}"
    zeros = f", {moe.padding} of them zeros" if moe.padding else ""
    made = f"the source has {plan.source_experts}" if plan.grown else f"{moe.copies} copies x {moe.granularity}"
    yield (
        "source",
        f"{public_name(config.source) if config.source else '(first donor)'}: {d.family}, {d.layers} layers, hidden "
        f"{d.hidden}, FFN {d.ffn}{'' if d.gated else ' without gate'}, {d.activation}",
    )
    if config.donors:
        yield "donors", ", ".join(map(public_name, config.donors))
    yield "target", f"{plan.target}: {plan.why}"
    yield (
        "experts",
        (
            f"{moe.experts} routed of {widths} neurons{zeros} ({made}), top-{moe.top_k}"
            + (f", and a shared one of {moe.shared}" if moe.shared else "")
            + f", in {len(moe.layers)} of {d.layers} layers"
        ),
    )
    yield "method", ", ".join(f"{k}={v}" if k != "name" else v for k, v in settings(plan)["method"].items())
    norm = "normalised over the chosen" if moe.weights_sum_to_one else "not normalised"
    each = f", {moe.top_k // moe.slices} of each of {moe.slices} slices" if moe.slices > 1 else ""
    init = config.router.init
    drawn = f"rows {init.name}" + ("" if init.name == "clusters" else f", std {init.std:g}")
    rows = "rows of the source" if plan.grown else drawn
    yield "router", f"{moe.score}, {moe.order}, {norm}{each}; {rows}"
    yield "scale", scale_text(plan)
    yield "function", promise_text(plan.promise)
    yield (
        "parameters",
        f"{human(s.total)} total, {human(s.active)} active ({s.total / s.dense:.2f}x and "
        f"{s.active / s.dense:.2f}x the {'source' if plan.grown else 'dense'} {human(s.dense)})",
    )
    flops, unused = plan.flops()
    beside = "" if plan.grown else f" (dense {human(size.dense_flops(d, config.sequence), 'FLOP')})"
    if unused:
        beside += f"; {human(unused, 'FLOP')} of them are zeros, because this target always computes a shared expert"
    yield (
        "FLOPs/token",
        f"{human(flops, 'FLOP')} forward and backward at {config.sequence} tokens{beside}",
    )
    yield (
        "on disk",
        f"{human(plan.bytes, 'B')} in {len(plan.shards)} file{'s' * (len(plan.shards) > 1)}, {moe.dtype}, "
        f"{len(plan.outputs)} tensors",
    )
    yield "runs on", engines.sentence(plan.target, plan.hf_config)
    if d.carried is None:
        yield "training", "memory on each GPU, by a training config: upcycle estimate CONFIG gpus=8"
    for name, why in plan.dropped[:8]:
        yield "dropped", f"{name}: {why}"
    if len(plan.dropped) > 8:
        yield "dropped", f"and {len(plan.dropped) - 8} more buffers"
    for note in plan.notes:
        yield "note", note
    for warning in plan.warnings:
        yield "warning", warning


def scale_text(plan: UpcyclePlan) -> str:
    moe = plan.moe
    if plan.scale == "calibrated" and not plan.observed:
        return (
            "calibrated: 1 / the router's mean mass, measured on the calibration text when converting, layer by layer"
        )
    factors = plan.factors(moe.layers[0])
    inside = (
        ", ".join(f"{m} x {f:.4g}" for m, f in factors.items() if f != 1 and m in ("gate", "up", "down"))
        or "weights as they are"
    )
    return f"{plan.scale}: {inside}" + (
        f", output x {moe.output_scale:g} in the model (routed_scaling_factor)" if moe.output_scale != 1 else ""
    )


def table(plan: UpcyclePlan) -> str:
    return "\n".join(f"{name:<12} {printable(text)}" for name, text in rows(plan))


def tensors(plan: UpcyclePlan) -> Iterator[str]:
    """Yield one line per output: name, shape, dtype, recipe."""
    for output in plan.outputs:
        first = str(output.parts[0])
        more = f", and {len(output.parts) - 1} parts more" if len(output.parts) > 1 else ""
        yield printable(f"{output.name}  {list(output.shape)}  {output.dtype}  =  {first}{more}")


def text(plan: UpcyclePlan, dense: Path, files: Iterable[str] = ()) -> str:
    """Return the README.md of a folder converted from the model in `dense`. `files`: names of the copied files."""
    sources = [plan.config.source, *plan.config.donors] if plan.config.source else list(plan.config.donors)
    shown = [row for row in rows(plan) if row[0] != "training"]
    return page(
        "upcycled to a mixture of experts", shown, plan.hf_config, sources, terms(dense), ["moe", "upcycled"], files,
        "To list every tensor and its sources, run in this folder: `upcycle plan upcycle.json tensors=true`; add "
        "`source=FOLDER` if the source model has moved.",
    )  # fmt: skip


def trained(
    manifest: Mapping[str, Any], config: Mapping[str, Any], base_terms: Mapping[str, Any], files: Iterable[str]
) -> str:
    """Return the README.md of a trained model, from its manifest and its config.json.

    `base_terms`: the license keys of its base; `files`: names of the copied files.
    """
    recipe = manifest.get("config", {})
    names = [name for name in (manifest["from"], *manifest["donors"]) if name]
    how = [
        ("base model", f"{public_name(name)}{f', fingerprint {mark[:16]}' if mark else ''}")
        for name, mark in zip(names, manifest["source"], strict=True)
    ]
    method = recipe.get("method", {})
    how += [("method", ", ".join(f"{k}={v}" if k != "name" else str(v) for k, v in method.items()))] if method else []
    how += [(key, str(recipe[key])) for key in ("experts", "granularity", "top_k") if key in recipe]
    how.append(("architecture", str(config.get("model_type"))))
    done, tags = f"{'upcycled and ' if recipe else ''}trained", ["moe", "upcycled"] if recipe else []
    return page(done, [*how, *learned(manifest["trained"])], config, names, base_terms, tags, files)


FORMATS = {  # how `upcycle quantize` stores a model
    "fp8": "FP8: 8-bit weights with a scale for each row; activations are rounded for each token when the model runs",
    "nvfp4": "NVFP4: 4-bit weights and activations in blocks of 16",
    "awq": "AWQ: 4-bit weights in groups, after channels were scaled by the activations of calibration text",
    "gguf": "GGUF, written by llama.cpp's converter",
}


def quantised(
    manifest: Mapping[str, Any], config: Mapping[str, Any], base_terms: Mapping[str, Any], files: Sequence[str]
) -> str:
    """Return the README.md of a quantised folder, from its manifest and the model's config.json."""
    how = manifest["quantised"]
    kind, _, precision = how["method"].partition(" ")
    names = [name for name in (how["model"], manifest["from"], *manifest["donors"]) if name]
    shown = [("quantised from", public_name(how["model"]))]
    shown += [("base model", public_name(name)) for name in names[1:]]
    shown.append(("format", FORMATS[kind] + (f", as {precision}" if precision else "")))
    if kind != "gguf":
        shown.append(("not rounded", "routers, norms, embeddings and the head"))
    shown += [("loss on text", change(how.get("text"))), ("runs on", how["runs"])]
    shown.append(("architecture", str(config.get("model_type"))))
    shown += learned(manifest["trained"]) if "trained" in manifest else []
    if kind == "gguf":
        run = ["Run it with llama.cpp in its own folder:", "", "```bash", f"llama-cli -m {files[0]}", "```"]
    else:
        run = [
            "Serve it with vLLM in its own folder:", "", "```bash",
            f"vllm serve .{' --trust-remote-code' * ('auto_map' in config)}", "```",
        ]  # fmt: skip
    tags = ["moe", "upcycled", kind] if "config" in manifest else ["moe", kind]
    return page(f"quantised ({how['method']})", shown, config, names, base_terms, tags, files, how=run)


def change(text: Measured | None) -> str:
    """Say by how much quantisation changed the loss on a text, as the manifest records it."""
    if text is None:
        return "not measured, because data named no text"
    before, after = text["before"], text["after"]
    where = f"on {text['tokens']:,} tokens of {', '.join(text['data'])}"
    return f"{after:.4f} nats per token, {after - before:+.4f} against {before:.4f} before, {where}"


def learned(trainings: Sequence[Training]) -> list[tuple[str, str]]:
    """Return table rows of a model's trainings: details of the last one, and the total tokens of earlier ones."""
    last, before = trainings[-1], [each.get("tokens", 0) for each in trainings[:-1]]
    rows = [("trained from", public_name(last["start"]))] if "start" in last else []
    rows += [("steps", f"{last['steps']:,}")] if "steps" in last else []
    rows += [("tokens trained", f"{last['tokens']:,}")] if "tokens" in last else []
    rows += [("trained before", f"{sum(before):,} tokens in {len(before)} run{'s' * (len(before) > 1)}")] * bool(before)
    rows += [("data", ", ".join(map(public_name, last["data"])))] if last.get("data") else []
    for name, (first, end) in last.get("losses", {}).items():
        rows.append((name, f"{first:.4f} at first, {end:.4f} at the end"))
    return [*rows, *((name, f"{score:.4g}") for name, score in last.get("scores", {}).items())]


def versions() -> dict[str, str]:
    """Return the versions of the packages that convert a model, for its manifest."""
    found = {name: version(name) for name in ("torch", "transformers", "safetensors", "omegaconf")}
    return found | {"python": platform.python_version(), "upcycle": __version__}


def page(
    done: str,
    shown: Iterable[tuple[str, str]],
    config: Mapping[str, Any],
    sources: Sequence[str],
    base_terms: Mapping[str, Any],
    tags: Sequence[str],
    files: Iterable[str],
    more: str = "",
    how: Sequence[str] = (),
) -> str:
    """Return a model card: metadata for the Hub, what was done to which model, how to run it, and a table.

    `how`: lines that say how to run it, if not as a model that is not quantised.
    """
    name = inert(public_name(sources[0])) if sources else "A model of random weights"
    lines = [
        f"# {name}, {done}", "",
        f"Made by upcycle {__version__} from `{name}`.",
        *(how or use(config, any(file.startswith(("tokenizer", "vocab")) for file in files))), "",
        "| | |", "|---|---|",
        *(f"| {key} | {inert(value)} |" for key, value in shown), "",
        *([more, ""] if more else []),
    ]  # fmt: skip
    return f"---\n{metadata(sources, config, base_terms, tags)}\n---\n" + "\n".join(lines)


def use(config: Mapping[str, Any], tokenizer: bool) -> list[str]:
    """Return lines that say how to run the model; `tokenizer`: whether the folder contains one."""
    if "router_n_groups" in config:
        lines = ["from lmdeploy import PytorchEngineConfig, pipeline", ""]
        lines.append('print(pipeline(".", PytorchEngineConfig())("Once upon a time"))')
        said = "This folder is only for LMDeploy, which needs a GPU; no test has asked it. In the folder:"
        return [said, "", "```python", *lines, "```"]
    said = "Talk to it with `upcycle chat FOLDER`, or load it in its own folder:"
    return [said, "", "```python", *snippet("auto_map" in config, tokenizer), "```"]


def snippet(remote: bool, tokenizer: bool) -> Iterator[str]:
    """Yield lines of Python that load the model from the current folder and generate text.

    `remote`: whether the folder contains model code.
    """
    names = f"AutoModelForCausalLM{', AutoTokenizer' * tokenizer}"
    yield f"from transformers import {names}  # {NEEDS['transformers']} or newer"
    yield ""
    code = ", trust_remote_code=True" if remote else ""
    yield f'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto"{code})'
    if not tokenizer:
        return
    # without trust_remote_code=False, transformers asks to run the code, which no tokenizer needs
    yield f'tokenizer = AutoTokenizer.from_pretrained("."{", trust_remote_code=False" if remote else ""})'
    yield 'text = tokenizer("Once upon a time", return_tensors="pt").to(model.device)'
    yield "print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0], skip_special_tokens=True))"


def metadata(
    sources: Sequence[str], config: Mapping[str, Any], base_terms: Mapping[str, Any], tags: Sequence[str]
) -> str:
    """Return the card's metadata for the Hub, with the hub ids of the bases and the license of the base."""
    from huggingface_hub import ModelCardData

    base: Any = list(dict.fromkeys(name for name in map(hub_id, sources) if name))
    data = ModelCardData(
        base_model=base[0] if len(base) == 1 else base or None,
        library_name="lmdeploy" if "router_n_groups" in config else "transformers",
        pipeline_tag="text-generation",
        tags=[*tags, config["model_type"]],
        **base_terms,
    )
    return data.to_yaml()


def hub_id(source: str) -> str:
    """Return the hub id of a source, or of a folder in the Hub's cache; "" for any other folder."""
    name = public_name(source).partition("@")[0]
    if source and "/" in name:
        return name
    cached = re.search(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)/snapshots/", source)
    return "/".join(cached.groups()) if cached else ""


def terms(dense: Path) -> dict[str, Any]:
    """Return license, license_name and license_link from the metadata of the base's own card."""
    file = dense / "README.md"
    if not file.is_file() or file.stat().st_size > MAX_CARD:
        return {}
    from huggingface_hub import ModelCard

    try:
        data: Any = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
        found = data.to_dict()
    except (ValueError, UnicodeDecodeError, YAMLError):
        return {}
    return {key: found[key] for key in LICENSE if isinstance(found.get(key), str)}
