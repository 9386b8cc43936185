"""Keep a copy of the starting model's config and files in the run's folder, so that the folder is complete.

    RUN/origin/config.json, tokenizer.json, ...    as in an export
    RUN/origin/observed.safetensors                upcycling's measurements on text, if any
    RUN/origin/origin.json                         which model this is, its plan as a table, and the sum of each file
                                                   next to it and of itself; written last

With a checkpoint's weights this is enough to resume, evaluate or export without the dense model and the measured text.
A file that differs from its sum is refused; folders of older versions have no sums, which is said.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
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
from training.checkpoint.state import CHECKPOINTS, JSON, STEP, Checkpoints, check_model, fill_model, found
from training.checkpoint.storage import Shards, read_whole
from training.config.checks import COMPUTE
from training.config.reading import upcycle_config
from training.config.schema import ModelConfig
from training.model.decoder import Decoder
from training.model.lora import LoraConfig, attach, encode
from training.model.names import plain_name
from training.optim.copies import is_stack, pull_
from training.parallel.collectives import broadcast_tensors, together
from training.parallel.processes import rank
from upcycle.arch import tokenizer
from upcycle.arch.targets.upcycled import MODELING
from upcycle.config.reading import build
from upcycle.config.schema import UpcycleConfig, renamed
from upcycle.converting import card
from upcycle.io import publish, strict
from upcycle.io.checkpoint import COPIED, TERMS, Checkpoint, own, read_header
from upcycle.io.disk import make_folder, sha256, sweep, write_atomic
from upcycle.io.strict import short
from upcycle.planning.plan import UpcyclePlan
from upcycle.text import measure
from upcycle.verifying.inspect import Settings

FOLDER, CONFIG, OBSERVED, RECORD = "origin", "config.json", "observed.safetensors", "origin.json"
MARK, SUM = "measured", "sum"  # in OBSERVED's metadata: digests of its inputs (model, settings, text), of its tensors
RUN = "run.json"  # the run's own config; config.json is a model's
RESTORE = "bring it back from a copy"


class Made(TypedDict):
    source: NotRequired[str]
    donors: NotRequired[list[str]]


class Named(TypedDict):
    source: NotRequired[str]
    upcycle: Made | None


class Record(TypedDict):
    model: Named
    files: list[str]
    sums: NotRequired[Mapping[str, str]]  # sha256 of each file that an export is made of
    settings: NotRequired[Settings | None]
    terms: NotRequired[Mapping[str, str]]  # licence and similar, of the base model
    past: NotRequired[layout.Past]
    plan: list[tuple[str, str]]
    tensors: NotRequired[list[tuple[str, list[int], str]]]  # for a model that transformers computes: name, shape, dtype


def keep(folder: Path, origin: Origin, config: ModelConfig) -> None:
    """Write RUN/origin from the Origin of the model that `config` names."""
    final = folder / FOLDER
    if final.is_symlink():
        raise ValueError(
            f"{final} is a link, and the run would write over files of {final.resolve()}; remove the link, or put the "
            "folder itself in its place"
        )
    if final.is_dir():
        sweep(final)
    # a folder with half of the files would not be known as a run's, so it gets its name with the record in it
    inside = begun(folder) or (final.is_dir() and any(final.iterdir()))
    home = final if inside else folder / f"{FOLDER}.{os.getpid()}-{uuid.uuid4().hex[:8]}.upcycle.tmp"
    if found(folder / CHECKPOINTS):
        (final / RECORD).unlink(missing_ok=True)  # of another model, which the checkpoints outlive
    try:
        fill(home, origin, config)
        if home != final:
            publish.rename(home, final)
    except BaseException:
        if home != final:
            shutil.rmtree(home, ignore_errors=True)
        raise


def fill(home: Path, origin: Origin, config: ModelConfig) -> None:
    """Write an Origin's files into a folder, its record last."""
    plan = origin.plan
    make_folder(home)
    held = {path.name: tokenizer.read(path, origin.tokenizer_class) for path in origin.files}
    held[CONFIG] = json.dumps(dict(origin.config), indent=2).encode() + b"\n"
    for name, data in held.items():
        write_atomic(home / name, data)
    if plan is None or not plan.observed:
        (home / OBSERVED).unlink(missing_ok=True)
    elif mark_of(home / OBSERVED) is None:  # else it was written after measuring
        keep_measured(home / OBSERVED, plan.observed)
    record: dict[str, Any] = {
        "model": named(config),
        "files": [path.name for path in origin.files],
        "sums": {name: hashlib.sha256(data).hexdigest() for name, data in held.items() if name != MODELING.name},
        "settings": origin.settings,
        "terms": origin.terms,
        "past": asdict(origin.past),
        "plan": [] if plan is None else list(card.rows(plan)),
    }
    if origin.dense.carried is not None:
        record["tensors"] = [(stored.name, stored.shape, stored.dtype) for stored in origin.tensors]
    write_atomic(home / RECORD, publish.signed(json.loads(json.dumps(record))))


def kept(folder: Path) -> Origin:
    """Return the Origin that a run keeps; reading weights from it raises a ValueError."""
    home, record = folder / FOLDER, recorded(folder)
    if record is None:
        raise ValueError(
            f"{folder} has no {FOLDER}/{RECORD}, so it does not say what model it trains; run the command that made it "
            "once more, which writes it"
        )
    files = [published(home / Path(name).name) for name in record["files"]]
    for path in [home / CONFIG, *files] if "sums" in record else ():
        if path.name != MODELING.name and sha256(path) != record["sums"].get(path.name):  # exports have today's code
            raise ValueError(f"{path} has changed since it was written: its sha256 differs; {RESTORE}")
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
    """Return the record of a run's model, or None if it has none."""
    path = folder / FOLDER / RECORD
    if not path.is_file():
        return None
    record = publish.unsigned(strict.read_object(path), path, f"{RESTORE}, or remove it, and the next start writes it")
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
    part = isinstance(config.method, Mapping) and config.method.get("name") == "part"
    init = replace(config.router.init, name="parts" if part else "clusters" if known else "normal")
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
    is_run = (run / CHECKPOINTS).is_dir() and settings_file(run).is_file()
    return (run, step) if is_run else (None, None)


def settings_file(run: Path) -> Path:
    """Return the file of a run's config, which older versions called config.json."""
    return run / (RUN if (run / RUN).is_file() else CONFIG)


def settings_of(run: Path) -> dict[str, Any]:
    """Return the config of a run; raise a ValueError if its file has changed since a run wrote it."""
    path = settings_file(run)
    return publish.unsigned(strict.read_object(path), path, RESTORE)


def dtype_of(run: Path) -> str:
    """Return a run's compute dtype from its config, or ""."""
    model = settings_of(run).get("model")
    dtype = model.get("dtype") if isinstance(model, dict) else None
    return dtype if dtype in COMPUTE else ""


def backend_of(run: Path) -> str:
    """Return a run's expert backend from its config, or "" if it has none."""
    model = settings_of(run).get("model")
    found = model.get("expert_backend") if isinstance(model, dict) else None
    return found if isinstance(found, str) else ""


def micro_batch_of(run: Path) -> int:
    """Return a run's micro_batch from its config, or 0."""
    found = settings_of(run).get("micro_batch")
    return found if isinstance(found, int) else 0


def attach_adapters(model: Decoder, run: Path) -> None:
    """Add the run's adapters to a model on the meta device, and make its experts codes if the run's are."""
    settings = settings_of(run)
    lora, kept = settings.get("lora"), settings.get("model")  # runs of older versions have no adapters
    if lora is not None:
        with torch.device("meta"):
            attach(model, build(LoraConfig, lora, "lora."))
        encode(model, str(kept.get("frozen")) if isinstance(kept, dict) else "")


def shards_of(run: Path, folder: Path | None) -> Shards:
    """Return a checkpoint of a run, its newest if none is given, after comparing its bytes with their sums."""
    if folder is not None:
        try:
            return Shards(folder, read_whole(folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} cannot be used: {error}") from error
    with Checkpoints(run / CHECKPOINTS, asynchronous=False) as checkpoints:
        saved = checkpoints.latest()
    if saved is None:
        raise ValueError(f"{run} has no checkpoint yet; evaluate it after its first one, or its model.source")
    return saved


def load_step(model: Decoder, run: Path, folder: Path | None) -> int:
    """Fill the model with the weights that an export of the run's checkpoint has, its newest if none is given; return
    the step. All ranks call this together."""
    saved = shards_of(run, folder)
    check_model(model, saved)
    fill_model(model, saved)
    shrink = shrink_of(saved)
    for name, parameter in model.named_parameters():
        if shrink and model.moe is not None and trains(saved, f"model.{plain_name(name)}"):
            pull_(parameter, model.moe.granularity, shrink)
    return saved.step


def shrink_of(saved: Shards) -> float:
    """Return the share of each expert's distance to the mean of its copies that a checkpoint leaves to its use as a
    model. It is 0 in older checkpoints, because older runs changed the weights themselves after the last step."""
    name = f"optimizer.group.all{JSON}"
    if name not in saved.tensors or saved.dtype(name) != torch.uint8:
        return 0.0
    group = strict.parse_object(saved.read(name).numpy().tobytes(), name, constants=True)
    shrink = group.get("shrink", 0.0)
    if not strict.is_number(shrink) or not 0 <= shrink <= 1:
        raise ValueError(f"{saved.folder} says shrink={short(shrink)}, and it is a share from 0 to 1; {RESTORE}")
    return float(shrink)


def trains(saved: Shards, name: str) -> bool:
    """Return whether a tensor of a checkpoint is a stack of experts that its run trains."""
    return is_stack(name) and f"optimizer.state.{name.removeprefix('model.')}{JSON}" in saved.tensors


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
                found = read_measured(path, plan)
            else:
                found = measure.measure(plan, checkpoints, text=text, device=device)
                if path is not None:
                    keep_measured(path, found, {MARK: sha.hexdigest()})
    return broadcast_tensors(found)


def keep_measured(path: Path, found: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write measurements with their digest and these facts."""
    make_folder(path.parent)
    write_atomic(path, save(dict(found), {**(facts or {}), SUM: digest_of(found)}))


def read_measured(path: Path, plan: UpcyclePlan) -> Mapping[str, Tensor]:
    """Read measurements; raise a ValueError if they have changed since they were written."""
    found = measure.read(path, plan)
    with safe_open(path, "pt") as file:
        stated = (file.metadata() or {}).get(SUM)
    if stated is None:
        warnings.warn(publish.NO_SUM.format(path), stacklevel=2)
    elif stated != digest_of(found):
        said = f"{path} has changed since it was written: its sum differs"
        raise ValueError(f"{said}; {RESTORE}, or remove it to measure again")
    return found


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


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
    return (lambda plan, _: read_measured(path, plan)) if path.is_file() else measure.measure
