"""Keep a copy of the starting model's config and files in the run's folder, so that the folder is complete.

    RUN/origin/config.json, tokenizer.json, ...    as in an export
    RUN/origin/observed.safetensors                upcycling's measurements on text, if any
    RUN/origin/origin.json                         which model this is, and its plan as a table; written last

With a checkpoint's weights this is enough to resume, evaluate or export without the dense model and the measured text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from training.checkpoint import layout
from training.checkpoint.layout import Origin
from training.checkpoint.state import STEP, Checkpoints, check_model, fill_model
from training.checkpoint.storage import Shards, read_whole
from training.config.checks import COMPUTE
from training.config.reading import upcycle_config
from training.config.schema import ModelConfig
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach
from training.parallel.collectives import broadcast_tensors, together
from training.parallel.processes import rank
from upcycle.arch.targets.upcycled import MODELING
from upcycle.config.reading import build
from upcycle.config.schema import UpcycleConfig, renamed
from upcycle.converting import card
from upcycle.io import strict
from upcycle.io.checkpoint import COPIED, TERMS, Checkpoint, own, read_header
from upcycle.io.disk import make_folder, sweep, write_atomic
from upcycle.io.job import read_json
from upcycle.io.strict import short
from upcycle.planning.plan import UpcyclePlan
from upcycle.text import measure
from upcycle.verifying.inspect import Settings

FOLDER, CONFIG, OBSERVED, RECORD = "origin", "config.json", "observed.safetensors", "origin.json"
MARK = "measured"  # in OBSERVED's metadata: the digest of the measured model, settings and text
RUN = "run.json"  # the run's own config; config.json is a model's


class Made(TypedDict):
    source: NotRequired[str]
    donors: NotRequired[list[str]]


class Named(TypedDict):
    source: NotRequired[str]
    upcycle: Made | None


class Record(TypedDict):
    model: Named
    files: list[str]
    settings: NotRequired[Settings | None]
    terms: NotRequired[Mapping[str, str]]  # licence and similar, of the base model
    past: NotRequired[layout.Past]
    plan: list[tuple[str, str]]
    tensors: NotRequired[list[tuple[str, list[int], str]]]  # for a model that transformers computes: name, shape, dtype


def keep(folder: Path, origin: Origin, config: ModelConfig) -> None:
    """Write RUN/origin from the Origin of the model that `config` names."""
    home, plan = folder / FOLDER, origin.plan
    make_folder(home)
    sweep(home)
    (home / RECORD).unlink(missing_ok=True)  # without the record the rest is ignored
    for path in origin.files:
        write_atomic(home / path.name, path.read_bytes())
    write_atomic(home / CONFIG, json.dumps(dict(origin.config), indent=2).encode() + b"\n")
    if plan is None or not plan.observed:
        (home / OBSERVED).unlink(missing_ok=True)
    elif mark_of(home / OBSERVED) is None:  # else it was written after measuring
        write_atomic(home / OBSERVED, save(dict(plan.observed)))
    record = {
        "model": named(config),
        "files": [path.name for path in origin.files],
        "settings": origin.settings,
        "terms": origin.terms,
        "past": asdict(origin.past),
        "plan": [] if plan is None else list(card.rows(plan)),
    }
    if origin.dense.carried is not None:
        record["tensors"] = [(stored.name, stored.shape, stored.dtype) for stored in origin.tensors]
    write_atomic(home / RECORD, json.dumps(record, indent=2).encode() + b"\n")


def kept(folder: Path) -> Origin:
    """Return the Origin that a run keeps; reading weights from it raises a ValueError."""
    home, record = folder / FOLDER, recorded(folder)
    if record is None:
        raise ValueError(
            f"{folder} has no {FOLDER}/{RECORD}, so it does not say what model it trains; run the command that made it "
            "once more, which writes it"
        )
    files = [published(home / Path(name).name) for name in record["files"]]
    entries = {name: (tuple(shape), dtype) for name, shape, dtype in record.get("tensors", ())} or None
    config = strict.read_object(home / CONFIG)
    origin = layout.described(folder, config, no_weights, files, record.get("settings"), entries)
    made: Made = record["model"]["upcycle"] or {}
    used = [record["model"].get("source"), made.get("source"), *made.get("donors", ())]
    past = record.get("past") or layout.Past({name: "" for name in used if name})  # older versions keep less
    return replace(origin, past=past, terms=record.get("terms", {}))


def published(file: Path) -> Path:
    """Return the file if an export may copy it; else raise a ValueError."""
    if not any(file.match(pattern) for pattern in (*COPIED, *TERMS, MODELING.name)):
        raise ValueError(f"{file.parent / RECORD} names {short(file.name)}, which an export must not copy")
    return own(file)


def no_weights(name: str, rows: tuple[int, int] | None = None) -> Tensor:
    raise ValueError(f"{name} cannot be made again, because this run's weights are in its checkpoints; restore them")


def keeps(folder: Path, config: ModelConfig) -> bool:
    """Return whether the run's copy is of the model that `config` names."""
    record = recorded(folder)
    return record is not None and record["model"] == named(config)


def named(config: ModelConfig) -> Any:
    """Return the part of a config that identifies its model, as JSON."""
    made = asdict(upcycle_config(config)) if config.upcycle else None
    facts = {"source": config.source, "random": config.random, "upcycle": made}
    return json.loads(json.dumps(facts, default=str))


def recorded(folder: Path) -> Record | None:
    path = folder / FOLDER / RECORD
    record = read_json(path)
    if not isinstance(record, dict) or "model" not in record:
        return None
    return cast(Record, strict.held(record, Record, str(path)))


def begun(folder: Path) -> bool:
    """Return whether a run in this folder keeps its model, or began to."""
    return recorded(folder) is not None or mark_of(folder / FOLDER / OBSERVED) is not None


def upcycled(folder: Path) -> UpcycleConfig | None:
    """Return the config that upcycled the run's model while loading, with router rows as decided; None without one."""
    record, measured = recorded(folder), folder / FOLDER / OBSERVED
    if not (record and record["model"]["upcycle"]):
        return None
    config = build(UpcycleConfig, renamed(record["model"]["upcycle"]))
    if config.router.init.name != "auto":
        return config
    known = measured.is_file() and any(name.endswith(".rows") for name in read_header(measured))
    init = replace(config.router.init, name="clusters" if known else "normal")
    return replace(config, router=replace(config.router, init=init))


def plan_rows(folder: Path) -> list[tuple[str, str]]:
    """Return the table of `upcycle plan` for a run that upcycled while loading."""
    record = recorded(folder)
    return [] if record is None else record["plan"]


# ---- the run's checkpoints


def training_run(path: Path) -> tuple[Path | None, Path | None]:
    """Return the run's folder, and the step's folder if `path` is one; (None, None) if it is not a training run."""
    step = path if STEP.fullmatch(path.name) and path.is_dir() else None
    run = path.parent.parent if step else path
    is_run = (run / "checkpoints").is_dir() and settings_file(run).is_file()
    return (run, step) if is_run else (None, None)


def settings_file(run: Path) -> Path:
    """Return the file of a run's config, which older versions called config.json."""
    return run / (RUN if (run / RUN).is_file() else CONFIG)


def dtype_of(run: Path) -> str:
    """Return a run's compute dtype from its config, or ""."""
    settings = read_json(settings_file(run))
    model = settings.get("model") if isinstance(settings, dict) else None
    dtype = model.get("dtype") if isinstance(model, dict) else None
    return dtype if dtype in COMPUTE else ""


def attach_adapters(model: Decoder, run: Path) -> None:
    """Add the run's adapters to a model on the meta device."""
    settings = strict.read_object(settings_file(run))
    lora = settings.get("lora")  # runs of older versions have none
    if lora is not None:
        with torch.device("meta"):
            attach(model, build(LoraConfig, lora, "lora."))


def shards_of(run: Path, folder: Path | None) -> Shards:
    """Return a checkpoint of a run, its newest if none is given, after comparing its bytes with their sums."""
    if folder is not None:
        try:
            return Shards(folder, read_whole(folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} cannot be used: {error}") from error
    with Checkpoints(run / "checkpoints", asynchronous=False) as checkpoints:
        saved = checkpoints.latest()
    if saved is None:
        raise ValueError(f"{run} has no checkpoint yet; evaluate it after its first one, or its model.source")
    return saved


def load_step(model: Decoder, run: Path, folder: Path | None) -> int:
    """Fill the model with the weights of a checkpoint of the run, its newest if none is given; return the step."""
    saved = shards_of(run, folder)
    check_model(model, saved)
    fill_model(model, saved)
    return saved.step


# ---- measurements of upcycling


def measured_once(
    plan: UpcyclePlan,
    checkpoints: Sequence[Checkpoint],
    *,
    folder: Path | None = None,
    given: Callable[[int], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Mapping[str, Tensor]:
    """Measure on rank 0 while the others wait, and return its results on all ranks. The run's `folder` keeps them for
    later starts. `given` makes ids [sequence, token] of a vocabulary if the config names no text."""
    found: Mapping[str, Tensor] = {}
    with together("measure"):  # all ranks continue together
        if rank() == 0:
            path = None if folder is None else folder / FOLDER / OBSERVED
            text = measure.tokens(plan, checkpoints, None if given is None else partial(given, plan.dense.vocab))
            sha = hashlib.sha256(json.dumps([plan.hash, *(c.fingerprint() for c in checkpoints)]).encode())
            for each in text:
                sha.update(each.numpy().tobytes())
            if path is not None and mark_of(path) == sha.hexdigest():
                found = measure.read(path, plan)
            else:
                found = measure.measure(plan, checkpoints, text=text, device=device)
                keep_measured(path, found, sha.hexdigest())
    return broadcast_tensors(found)


def keep_measured(path: Path | None, found: Mapping[str, Tensor], mark: str) -> None:
    """Write measurements with the digest of their inputs."""
    if path is not None:
        make_folder(path.parent)
        write_atomic(path, save(dict(found), {MARK: mark}))


def mark_of(path: Path) -> str | None:
    """Return the digest of model, settings and text in a file of measurements, or None."""
    try:
        read_header(path)
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {})[MARK])
    except (OSError, ValueError, KeyError):
        return None


def measured_before(folder: Path) -> layout.Observe:
    """Return a function that gives the run's measurements, to make its first weights again; without a record it
    measures.
    """
    path = folder / FOLDER / OBSERVED
    return (lambda plan, _: measure.read(path, plan)) if path.is_file() else measure.measure
