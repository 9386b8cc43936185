"""Describe a checkpoint folder (`describe`), and compare its files with its manifest (`check`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from tqdm import tqdm

from upcycle.arch import registry, siblings
from upcycle.arch.spec import MoESpec
from upcycle.cli.frame import printable
from upcycle.converting import card, grow
from upcycle.converting.card import human
from upcycle.converting.convert import Read, changed
from upcycle.io import publish, strict, typed
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.job import JOB
from upcycle.io.publish import MANIFEST
from upcycle.io.strict import Count
from upcycle.planning import methods

SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_local_experts",
    "num_experts", "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip
CHOOSES = "chooses in each of {} slices, so the chosen experts always form whole FFNs"


# the fields that are read from a manifest
class Method(TypedDict):
    name: str


class Settings(TypedDict):
    method: Method
    experts: NotRequired[Count]  # without it nobody knows which experts are copies
    granularity: Count


class Promised(TypedDict):
    exact: bool
    tolerance: float
    reasons: list[str]


class Written(TypedDict):
    bytes: Count
    sha256: str


Trained = TypedDict(  # the manifest of a model that was trained and exported
    "Trained",
    {
        "from": str,
        "donors": list[str],
        "source": list[str],
        "trained": list[card.Training],
        "files": Mapping[str, Written],
        "sum": str,
        "config": NotRequired[Settings],  # of the conversion; in_slices reads these fields
        "parts": NotRequired[Mapping[str, str]],  # of a joined model: sha256 of each part's tensors
    },
)


class How(TypedDict):
    """How a model was quantised."""

    method: str
    model: str  # the folder or hub id that was quantised
    runs: str
    text: NotRequired[card.Measured]


Quantised = TypedDict(  # the manifest of a quantised model
    "Quantised",
    {
        "from": str,
        "donors": list[str],
        "quantised": How,
        "files": Mapping[str, Written],
        "sum": str,
        "config": NotRequired[Settings],
        "trained": NotRequired[list[card.Training]],
    },
)
Manifest = TypedDict(
    "Manifest",
    {
        "from": str,
        "plan": str,
        "config": Settings,
        "promise": Promised,
        "files": Mapping[str, Written],
    },
)


class WholeManifest(Manifest):
    """A manifest that also records the tensors that were read; manifests of older versions do not."""

    read: Read
    source: list[str]
    sources: list[Mapping[str, list[int]]]
    donors: list[str]
    method: Any
    sum: str


def describe(folder: Path, *, tensors: bool = False) -> str:
    with Checkpoint.open(folder) as checkpoint:
        entries, config = checkpoint.entries, checkpoint.config
        size = sum(entry.stop - entry.start for entry in entries.values())
        dtypes: dict[str, int] = {}
        for entry in entries.values():
            dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + prod(entry.shape)
        lines = {
            "model type": str(config.get("model_type")),
            "parameters": human(sum(dtypes.values()))
            + f" in {len(entries)} tensors ({', '.join(f'{human(n)} {d}' for d, n in dtypes.items())})",
            "on disk": f"{human(size, 'B')} in {len(checkpoint.files)} file{'s' * (len(checkpoint.files) > 1)}",
            **{key: str(config[key]) for key in SIZES if config.get(key) is not None},
        }
        manifest = read_manifest(checkpoint.folder)
        if manifest:
            lines["made from"] = ", ".join(source_names(manifest)) or "random weights"
        if manifest and "config" in manifest:
            lines["method"] = ", ".join(f"{k}={v}" for k, v in manifest["config"]["method"].items())
        if manifest and "trained" in manifest:
            lines |= dict(card.learned(manifest["trained"]))
        if manifest and "quantised" in manifest:
            how = manifest["quantised"]
            lines |= {
                "quantised": f"{how['method']}, from {how['model']}",
                "loss on text": card.change(how.get("text")),
            }
        elif manifest and "trained" not in manifest:
            promise = manifest["promise"]
            lines |= {
                "function": "exact" if promise["exact"] else f"not exact: {'; '.join(promise['reasons'])}",
                "plan": manifest["plan"],
            }
            try:
                lines |= dict(router_rows(checkpoint, manifest))
            except (ArithmeticError, AttributeError, LookupError, TypeError, RuntimeError) as error:
                raise ValueError(
                    f"config.json of {folder} has changed since the conversion ({error!r}); convert again"
                ) from None
        slices = typed.whole(config, "expert_slices", 1) if config.get("model_type") == "upcycled" else 1
        if slices > 1:
            lines["router"] = CHOOSES.format(slices)
        if config.get("model_type") == "upcycled" and config.get("expert_parts"):
            plain = {key: value for key, value in config.items() if key != "quantization_config"}
            parts = registry.readable("upcycled").read(plain).parts
            lines["parts"] = "the base's own FFN, " + ", ".join(f"{name} ({copies})" for name, copies in parts)
        text = "\n".join(f"{name:<20} {printable(value)}" for name, value in lines.items())
        if tensors:
            text += "\n\n" + "\n".join(
                f"{e.name}  {list(e.shape)}  {e.dtype}  {printable(e.file.name)}" for e in entries.values()
            )
        return text


def router_rows(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield lines (name, value) on how far the router rows of a virtual group differ, layer by layer.

    Equal rows choose whole FFNs. Rows that differ may choose one slice twice and another one never; only a measurement
    on text can tell (`upcycle routing`).
    """
    if manifest["config"]["granularity"] == 1:
        return
    kind, granularity, equal = str(checkpoint.config["model_type"]), int(manifest["config"]["granularity"]), 0
    if kind in siblings.MOE:  # no MoESpec can be read from its config
        if makes_no_copies(manifest["config"]):
            return
        names = siblings.MoE(siblings.MOE[kind]).routers(checkpoint.entries)
    else:
        target = registry.readable(kind)
        moe = in_slices(target.read(checkpoint.config), manifest["config"])
        if not moe.copies_of_slices:
            return
        if moe.slices > 1:
            yield "router", CHOOSES.format(moe.slices)
            return
        found = {role: slot.name for slot in target.slots(moe) for role in slot.roles if role.endswith("router.weight")}
        names = {layer: found[f"layers.{layer}.router.weight"] for layer in moe.layers}
    for layer, name in names.items():
        rows_ND = checkpoint.read(name).double()
        rows_EGD = rows_ND.view(-1, granularity, rows_ND.shape[1])
        mean_E1D = rows_EGD.mean(1, keepdim=True)
        most = float((rows_EGD.amax(1) - rows_EGD.amin(1)).max())
        spread = float((rows_EGD - mean_E1D).norm() / (mean_E1D.norm() * granularity**0.5))
        equal += most == 0
        if most > 0:
            yield f"router of layer {layer}", f"rows of a group differ by up to {most:.3g}, {spread:.2%} of their size"
    if equal:
        yield "router rows", f"equal within groups of {granularity} in {equal} of {len(names)} MoE layers"


def method_of(config: Mapping[str, Any]) -> methods.Method | None:
    """Return the config's method, or None if it changes the number of experts of an MoE."""
    name, keys = config["method"]["name"], {key: value for key, value in config["method"].items() if key != "name"}
    return None if name in grow.METHODS else methods.load(name, keys)


def makes_no_copies(config: Mapping[str, Any]) -> bool:
    """Return True if the config's method cuts one FFN into experts, without copies."""
    method = method_of(config)
    return method is not None and method.needs.disjoint


def in_slices(moe: MoESpec, config: Mapping[str, Any]) -> MoESpec:
    """Return `moe` with the copies and granularity of the plan's `config`, which config.json does not have.

    `disjoint` is set if the method makes no copies, and if the number of experts of an MoE source was changed, because
    then it is unknown which experts are copies. Raise a ValueError if manifest and config.json disagree.
    """
    granularity = 1 if makes_no_copies(config) else int(config["granularity"])
    grown = (
        config["method"]["name"] in grow.METHODS
        or int(config.get("experts", 0)) * int(config["granularity"]) != moe.experts
    )
    if granularity < 1 or moe.experts % granularity:
        raise ValueError(
            f"{MANIFEST} says granularity={granularity}, which does not divide the {moe.experts} experts of "
            "config.json; do the two belong to the same model?"
        )
    if moe.slices not in (1, granularity):  # expert_slices is part of the model, so it must match
        raise ValueError(
            f"{MANIFEST} says granularity={granularity}, but config.json says expert_slices={moe.slices}; do the two "
            "belong to the same model?"
        )
    apart, method = grown or makes_no_copies(config), method_of(config)
    copies, equal = moe.experts // granularity, method is None or method.exact
    return replace(moe, copies=copies, granularity=granularity, disjoint=apart, equal=equal)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a converted or exported folder; return None if it has none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = strict.read_object(path)
        kind: Any = Quantised if "quantised" in manifest else Trained if "trained" in manifest else Manifest
        checked: dict[str, Any] = strict.held(manifest, kind, str(path))
        return checked
    except ValueError as error:
        raise ValueError(f"{path} is not a manifest that upcycle wrote ({error}); convert or export again") from None


def read_whole_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a converted folder; raise a ValueError if it does not record the tensors that were read."""
    manifest = read_manifest(folder)
    if manifest is None or {"trained", "quantised"} & manifest.keys():
        return None
    try:
        whole: dict[str, Any] = strict.held(manifest, WholeManifest, str(folder / MANIFEST))
        return whole
    except ValueError as error:
        raise ValueError(
            f"{folder / MANIFEST} does not record the tensors that were read, as this version does ({error}); convert "
            "again"
        ) from None


def check(folder: Path) -> bool:
    """Print each fault of a folder to stderr; return True if there are no faults.

    The size and sha256 of each file must match the manifest, every weight must be finite, and the source (if it is
    here) must not have changed since it was read.
    """
    faults = []
    converted = read_whole_manifest(folder)
    manifest = converted or read_manifest(folder)
    if manifest and manifest["sum"] != publish.digest(manifest):
        faults.append(f"{MANIFEST} has changed since it was written: its sum differs")
    if manifest:
        faults += publish.damages(folder / MANIFEST, manifest["files"], every=True)
    with Checkpoint.open(folder) as checkpoint:
        for name in tqdm(checkpoint.entries, desc="values", delay=2):
            try:
                checkpoint.read(name)
            except ValueError as error:
                faults.append(str(error))
    source = ""
    if converted:
        source = ", and so is the source" if source_here(converted) else "; the source is not here"
        faults += changed_source(converted) if source_here(converted) else []
    for line in faults:
        print(f"upcycle: {printable(line)}", file=sys.stderr)
    verdict = (
        f"sizes, sha256 and values are right{source}"
        if manifest
        else "values are finite; without a manifest, sizes, sha256 and other files cannot be checked"
    )
    print(f"{'checked':<20} {verdict if not faults else f'{len(faults)} wrong'}")
    if manifest and (others := unchecked(folder, manifest["files"])):
        print(f"{'not checked':<20} {', '.join(others)}: not in the manifest")
    return not faults


def unchecked(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """List the files in a folder that its manifest does not have: the model card, and files added later."""
    known = {MANIFEST, JOB, *files}
    return sorted(repr(path.name)[1:-1] for path in folder.iterdir() if path.name not in known)


def source_names(manifest: Mapping[str, Any]) -> list[str]:
    """Return the folders or hub ids of the models that the converted model was made from."""
    donors: list[str] = strict.held(manifest.get("donors", []), list[str], f"{MANIFEST}: donors")
    first = manifest["from"] or next(iter(donors), "")
    return [first, *donors] if first else []


def source_here(manifest: Mapping[str, Any]) -> bool:
    return all(Path(name).is_dir() for name in source_names(manifest))


def changed_source(manifest: Mapping[str, Any]) -> list[str]:
    """Return a list with the first change of the source models since they were read; empty if there is none."""
    try:
        with ExitStack() as stack:
            checkpoints = [stack.enter_context(Checkpoint.open(name)) for name in source_names(manifest)]
            what = changed(manifest["read"], checkpoints, {})
    except ValueError as error:
        return [f"the source: {error}"]
    return [f"{what} has changed since this folder was converted from it; convert again"] if what else []
