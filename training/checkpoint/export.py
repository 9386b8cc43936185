"""Export a model as a Hugging Face folder; peft.py exports adapters.

No rank holds the whole model: a divided model is read back from its newest checkpoint, one tensor at a time, and each
rank writes some of the files. torch.distributed.checkpoint's consolidation of safetensors would lose each
architecture's names and stacking, merged adapters, and file sums.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from training.checkpoint.layout import Index, Origin, Stored, bounds, joined, roles
from training.checkpoint.standalone import settings_of, shrink_of, trains
from training.checkpoint.storage import STAGE, Host, Shards, not_finite
from training.model.decoder import Decoder
from training.model.lora import delta, pairs
from training.model.moe import Experts
from training.model.names import plain_name
from training.model.nf4 import Codes, decode
from training.observe import metrics
from training.optim.copies import pull_
from training.parallel.collectives import gather, local, together
from upcycle.arch import tokenizer
from upcycle.arch.targets.upcycled import MODELING
from upcycle.config.reading import byte_size
from upcycle.converting import card
from upcycle.io import disk, publish, remote
from upcycle.io.checkpoint import INDEX
from upcycle.io.job import JOB, Worker, check_first, explained, job, read_json
from upcycle.verifying.inspect import read_manifest

CARD = "README.md"  # not in the manifest, because its owner may edit it


class Roles(Protocol):
    """The weights of a model."""

    def role(self, role: str) -> Tensor:
        """Return the whole tensor of a role."""
        ...


class Weights:
    """Read a model's whole tensors, from the undivided model or from its checkpoint `saved`; then the model may be on
    the meta device, and experts are pulled as the checkpoint says. Roles are on the model's device if it is undivided
    and each is a part of one of its tensors, else in host memory."""

    def __init__(self, model: Decoder, saved: Shards | None = None) -> None:
        self.model, self.saved, self.roles = model, saved, roles(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        self.names = {id(tensor): f"model.{plain_name(name)}" for name, tensor in named}
        self.adapters = {id(matrix): (a, b, scale) for matrix, a, b, scale in pairs(model)}
        self.codes: dict[int, Codes] = {}
        for name, module in model.named_modules():
            if isinstance(module, Experts) and module.up_codes is not None and module.down_codes is not None:
                self.codes |= {id(module.up): module.up_codes, id(module.down): module.down_codes}
                self.names |= {id(each): f"model.{plain_name(name)}.matrices" for each in (module.up, module.down)}
        self.shrink = 0.0 if saved is None or model.moe is None else shrink_of(saved)
        self.pulled = {key for key, name in self.names.items() if self.shrink and saved and trains(saved, name)}
        self.made: dict[int, Tensor] = {}

    def whole(self, tensor: Tensor, index: Index = ()) -> Tensor:
        """Return tensor[index] of one of the model's tensors, which is decoded if it is codes."""
        if (codes := self.codes.get(id(tensor))) is not None:
            code, step, edges = map(self.whole, (codes.code, codes.step, codes.bounds))
            return decode(code, step, edges, codes.numbers, torch.float32).view(tensor.shape)[index]
        if self.saved is None:
            return local(tensor.detach())[index].cpu()
        part = self.saved.read(self.names[id(tensor)], bounds(tensor.shape, index))
        return part[tuple(0 if isinstance(at, int) else slice(None) for at in index)]

    def role(self, role: str) -> Tensor:
        """Return a role's tensor with its adapters merged, or with its experts pulled."""
        tensor, index = self.roles[role]
        if self.saved is None and not self.adapters and not self.codes:
            return local(tensor.detach())[index]
        if id(tensor) not in self.adapters.keys() | self.codes.keys() | self.pulled:
            return self.whole(tensor, index)
        if id(tensor) not in self.made:
            module = self.module(id(tensor))  # stacked experts' up and down are read in turn
            self.made = {key: made for key, made in self.made.items() if self.module(key) == module}
            self.made[id(tensor)] = self.make(tensor)
        return self.made[id(tensor)][index]

    def module(self, key: int) -> str:
        """Return the name of a tensor's module."""
        return self.names[key].rpartition(".")[0]

    def make(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor as the model uses it."""
        whole = self.whole(tensor)
        if id(tensor) in self.pulled:
            assert self.model.moe is not None
            pull_(whole, self.model.moe.granularity, self.shrink)
        if id(tensor) not in self.adapters:
            return whole
        a, b, scale = self.adapters[id(tensor)]
        return whole + delta(self.whole(a), self.whole(b), scale, tensor.shape, [(0, size) for size in tensor.shape])


@torch.no_grad()
def export(
    model: Decoder,
    origin: Origin,
    folder: str | Path,
    *,
    saved: Shards | None = None,
    facts: card.Training | None = None,
    dtype: str = "",
    max_shard: str = "5GB",
) -> Path:
    """Write the model as a folder in its origin's layout; the folder gets its name when it is complete.

    saved: the checkpoint that all processes read weights from; without it the model is on one process. facts: what is
    known about the training."""
    made = provenance(origin, facts or {})
    about = card.trained(made, origin.config, origin.terms, [path.name for path in origin.files])
    return write(origin, folder, lambda: Weights(model, saved), made, about, dtype=dtype, max_shard=max_shard)


def write(
    origin: Origin,
    folder: str | Path,
    open_weights: Callable[[], Roles],
    made: Mapping[str, Any],
    about: str,
    *,
    dtype: str = "",
    max_shard: str = "5GB",
) -> Path:
    """Write a folder in the layout of an origin, with the weights that `open_weights` opens.

    made: the manifest without the list of files. about: the model card."""
    folder = Path(folder)
    partial, rank, world = folder.with_name(folder.name + ".partial"), 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    dtype = dtype or origin.dense.dtype
    # a float32 tensor of a bf16 model (the router's correction bias) stays float32
    tensors = [replace(t, dtype=dtype if t.dtype == origin.spec.dtype else t.dtype) for t in origin.tensors]
    shards = disk.shards(tensors, byte_size(max_shard))
    texts = texts_of(origin, dtype, shards) | {CARD: about}
    names, what = sorted([*(name for name, _ in shards), *texts, *(p.name for p in origin.files)]), "export the model"
    with ExitStack() as stack:
        with together(what):
            if rank == 0:
                stack.enter_context(unfinished(partial, folder, names))
        with together(what):
            weights = open_weights()
            sums = {name: write_shard(partial / name, group, weights) for name, group in shards[rank::world]}
        files = {name: line for each in gather(sums) for name, line in each.items()}
        with together(what):
            if rank == 0:
                finish(partial, folder, origin, texts, {name: files[name] for name, _ in shards}, made)
    return folder


def texts_of(origin: Origin, dtype: str, shards: Sequence[tuple[str, list[Stored]]]) -> dict[str, str]:
    """Return config.json and, for several shards, the index."""
    config = {k: v for k, v in origin.config.items() if k != "torch_dtype"} | {"dtype": dtype}
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    if len(shards) > 1:
        total = sum(stored.bytes for _, group in shards for stored in group)
        index = {"metadata": {"total_size": total}, "weight_map": {t.name: n for n, group in shards for t in group}}
        texts[INDEX] = json.dumps(index, indent=2)
    return texts


def write_shard(path: Path, group: Sequence[Stored], weights: Roles) -> dict[str, Any]:
    """Write tensors as a safetensors file and return its size and sha256."""
    total, host = sum(stored.bytes for stored in group), Host()
    with disk.Stream(path) as stream, tqdm(total=total, desc=path.name, unit="B", unit_scale=True, delay=2) as bar:
        stream.write(disk.header(group))
        for several in batched(group):
            made = {}
            for stored in several:
                parts = {role: weights.role(role) for role, _ in stored.roles}
                made[stored.name] = joined(stored, parts).to(getattr(torch, stored.dtype)).contiguous()
            check_finite(made)
            for part in host.parts(*made.values()):
                stream.write(part)
            bar.update(sum(stored.bytes for stored in several))
    return {"bytes": stream.bytes, "sha256": stream.sha256}


def batched(group: Sequence[Stored]) -> Iterator[list[Stored]]:
    """Yield the tensors in lists of up to STAGE bytes: a GPU takes as long for a small tensor as for many."""
    several: list[Stored] = []
    size = 0
    for stored in group:
        if several and size + stored.bytes > STAGE:
            yield several
            several, size = [], 0
        several.append(stored)
        size += stored.bytes
    yield several


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a tensor to export is not finite."""
    if name := not_finite(tensors):
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} is not finite in {dtype}, so the model is not exported; export an earlier checkpoint with upcycle "
            "export RUN/checkpoints/step-NUMBER FOLDER"
        )


def provenance(origin: Origin, facts: card.Training) -> dict[str, Any]:
    """Return the manifest's part on where a trained model comes from."""
    past, facts = origin.past, {**facts}
    if past.start and past.start not in past.base:
        facts |= {"start": past.start, "start_sum": past.start_sum}
    names = [*past.base]
    return {
        "format": 1,
        "from": names[0] if names else "",
        "donors": names[1:],
        "source": list(past.base.values()),
        "trained": [*past.trained, facts],
        **({} if origin.settings is None else {"config": origin.settings}),
        "versions": card.versions(),
    }


def finish(
    partial: Path,
    folder: Path,
    origin: Origin,
    texts: Mapping[str, str],
    files: Mapping[str, Mapping[str, Any]],
    made: Mapping[str, Any],
) -> None:
    """Write all files except the shards `files`, and give the folder its name. `made`: the rest of the manifest."""
    for name, text in texts.items():
        disk.write_atomic(partial / name, text.encode())
    for path in origin.files:  # today's modelling file, not the one from when the run began
        today = MODELING if path.name == MODELING.name else path
        tokenizer.copy(today, partial / path.name, origin.tokenizer_class)
    beside = [partial / name for name in (*texts, *(path.name for path in origin.files)) if name != CARD]
    manifest = {**made, "files": {**files, **publish.listed(beside)}}
    disk.write_atomic(partial / publish.MANIFEST, publish.signed(manifest))
    publish.rename(partial, folder)
    shutil.rmtree(folder / JOB, ignore_errors=True)


@contextmanager
def unfinished(partial: Path, folder: Path, names: list[str]) -> Iterator[None]:
    """Let only this process write `partial`, with files of these names; remove those of a killed export."""
    check_new(folder)
    before = read_json(partial / JOB / "job.json")
    with explained(partial), job(partial, {"export": names}, Worker(), lambda: None):
        check_first(partial, folder)
        if isinstance(before, dict):
            for name in {*before.get("export", ())} - {*names}:
                (partial / Path(name).name).unlink(missing_ok=True)
        disk.sweep(partial)
        yield


def check_new(folder: Path) -> None:
    """Raise a ValueError if an export's folder exists."""
    if folder.exists():
        if read_manifest(folder):
            shutil.rmtree(folder / JOB, ignore_errors=True)  # left if a kill came right after the rename
        raise ValueError(f"{folder} exists already; remove it or choose another folder to export to")


def exported(folder: Path) -> bool:
    """Return whether a run was exported to this folder; raise a ValueError if it has changed since."""
    manifest = read_manifest(folder)
    if manifest:
        shutil.rmtree(folder / JOB, ignore_errors=True)  # left if a kill came right after the rename
    if manifest and "sum" in manifest:
        publish.unsigned(manifest, folder / publish.MANIFEST, f"remove {folder}, or choose another folder")
    if manifest and (said := next(publish.damages(folder / publish.MANIFEST, manifest["files"]), "")):
        raise ValueError(f"{said}, so {folder} has changed since the export; remove it, or choose another folder")
    if manifest is None and folder.exists():
        said = f"{folder} was there and has no {publish.MANIFEST}, so nobody knows whether it is this run's model"
        warnings.warn(f"{said}; to export again, remove it or choose another folder", stacklevel=2)
    return folder.exists()


# ---- to a store


def folder_for(target: str, run: Path, step: int) -> Path:
    """Return the folder to export to: the target, or for an address a folder in the run's, which `send` takes there."""
    return run / f"export-{step:08d}" if remote.is_url(target) else Path(target)


def send(folder: Path, target: str) -> None:
    """Send an export to the store of its target, if that is an address, and remove the folder here."""
    if remote.is_url(target) and folder.is_dir():
        remote.push_folder(folder, target, publish.MANIFEST)
        shutil.rmtree(folder)


# ---- facts about the training


def facts_of(run: Path, step: int) -> card.Training:
    """Return facts about a run's training up to a step: tokens, data, losses, scores."""
    rows = [row for row in metrics.read(run) if row["step"] <= step]
    losses: dict[str, tuple[float, float]] = {}
    scores: dict[str, float] = {}
    facts: card.Training = {"steps": step, "data": data_of(run), "losses": losses, "scores": scores}
    for key in sorted({key for row in rows for key in row}):
        values = [row[key] for row in rows if row.get(key) is not None]
        kind, _, name = key.partition("/")
        if key == "tokens" and values:
            facts["tokens"] = values[-1]
        elif kind in ("loss", "valid", "eval") and all(map(math.isfinite, values)) and values:
            if kind == "eval":
                scores[name] = values[-1]
            else:
                losses[f"validation {name}".replace("/", " ") if name else "training loss"] = (values[0], values[-1])
    return facts


def data_of(run: Path) -> list[str]:
    """Return the names of the run's training data, with those of its stages."""
    settings = settings_of(run)
    parts = [part for part in (settings, *settings.get("stages", ())) if isinstance(part, dict)]
    data = [part["data"] for part in parts if isinstance(part.get("data"), dict)]
    trains = [each if isinstance(each, dict) else {"path": each} for one in data for each in one.get("train") or ()]
    names = [each.get("name") or Path(str(each.get("path", ""))).name for each in trains]
    names += [one.get("stream", "") for one in data]
    return [name for name in dict.fromkeys(names) if name]
