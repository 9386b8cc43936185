"""Save and load everything that a run needs to resume as if it had never stopped.

A tensor is stored as a safetensors tensor, anything else (a step, a betas tuple) as JSON text in a tensor of bytes. An
optimizer is saved by parameter name and filled in place, because torch's Optimizer.load_state_dict rounds fp32 moments
to a bf16 parameter's type, which would break bitwise resumes.

    with Checkpoints(folder, keep=3) as checkpoints:
        state.step = checkpoints.load(state)          # 0 if there is none
        while state.step < steps:
            ...
            if state.step % every == 0: checkpoints.save(state.step, state)
        checkpoints.save(state.step, state)
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from training.checkpoint import storage
from training.checkpoint.storage import Manifest, Shards
from training.config.resume import judge
from training.model.names import plain_name
from training.parallel.collectives import box, gather, local, together
from upcycle.io import strict
from upcycle.io.disk import sync_folder

CHECKPOINTS = "checkpoints"  # the checkpoints' folder in the run's folder
BESIDE = {"mean", "has", "unsent"}  # a parameter's state that the update does not need: a mean, an island's values
JSON = ".json"  # suffix of values that are stored as text
STEP = re.compile(r"step-(\d{8,})(\.replaced)?", re.ASCII)
WASTE = re.compile(r"step-\d{8,}\.(partial|removed)", re.ASCII)


class Part(Protocol):
    """A part of the state: the data's cursor, the balance biases, the spike guard."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Rng:
    """The random generators of this process, stored for each rank."""

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])


@dataclass
class TrainState:
    """The content of a checkpoint. Tensors may be DTensors; other values are equal on all ranks, except rng."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    step: int = 0
    parts: dict[str, Part] = field(default_factory=dict)  # equal on all ranks
    rng: Rng = field(default_factory=Rng)
    light: bool = False  # it was loaded from a checkpoint without moments

    def tensors(self, rank: int, *, moments: bool = True) -> dict[str, Tensor]:
        """Return everything, by name; without `moments`, leave out those of parameters that are their own masters."""
        out = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        put(out, "step", self.step)
        for name, group in self.groups().items():
            put(out, f"optimizer.group.{name}", {k: v for k, v in group.items() if k != "params"})
        for name, (optimizer, parameter) in self.trained().items():
            if parameter in (states := optimizer.state):
                kept = moments or "master" in states[parameter]
                put(out, f"optimizer.state.{name}", states[parameter] if kept else {})
        for name, part in self.named_parts(rank).items():
            put(out, name, part.state_dict())
        return out

    def adopt(self, saved: Shards, own: Mapping[str, Tensor], rank: int) -> None:
        """Load everything from a checkpoint that `check_model` has compared. `own`: this state's tensors, filled in
        place where they fit."""
        fill_model(self.model, saved)
        get = Getter(saved, own)
        self.step = get("step")
        for name, group in self.groups().items():
            if f"optimizer.group.{name}{JSON}" not in saved.tensors:
                raise ValueError(
                    f"{saved.folder} has no optimizer group {name!r}; resume with the optimizer settings that made it"
                )
            group.update(get(f"optimizer.group.{name}"))
        for name, (optimizer, parameter) in self.trained().items():
            mine, theirs = optimizer.state[parameter], dict[str, Any]()
            if f"optimizer.state.{name}{JSON}" in saved.tensors:  # else it was frozen, and its moments start at zero
                theirs = get(f"optimizer.state.{name}")
                self.light |= not theirs
                mine.update(moments(mine, theirs))  # in place, because the optimizer may reference it
            if "mean" in mine and "mean" not in theirs:  # as if all counted steps had had these weights
                mine["mean"].copy_(mine.get("master", parameter).detach())
        parts = self.named_parts(rank)
        for name, part in parts.items():
            if name + JSON in saved.tensors:
                part.load_state_dict(get(name))
            else:
                warn(f"{saved.folder} has no {name!r}, which starts again: this resume is not bitwise")
        for name in (each.removesuffix(JSON) for each in saved.tensors if each.endswith(JSON)):
            if name.startswith("part.") and name not in parts:
                warn(f"{saved.folder} has {name!r}, which this run has no use for")

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return the optimizers' groups by `name`: their numbers may differ between pipeline stages."""
        return {
            str(group.get("name", f"{i}.{j}")): group
            for i, optimizer in enumerate(self.optimizers)
            for j, group in enumerate(optimizer.param_groups)
        }

    def trained(self) -> dict[str, tuple[Optimizer, nn.Parameter]]:
        """Return each parameter that an optimizer has, with the optimizer, by plain name."""
        owner = {p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        return {plain_name(n): (owner[p], p) for n, p in self.model.named_parameters() if p in owner}

    def named_parts(self, rank: int) -> dict[str, Part]:
        return {f"part.{name}": part for name, part in self.parts.items()} | {f"rank.{rank}.rng": self.rng}


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


# ---- values as tensors


def put(out: MutableMapping[str, Tensor], name: str, value: Any) -> None:
    """Put a value into `out`: its tensors under their own names, the rest as JSON text in a tensor of bytes."""
    text = json.dumps(pack(value, name, out)).encode()
    out[name + JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def pack(value: Any, name: str, out: MutableMapping[str, Tensor]) -> Any:
    """Return a value as JSON, in which $ marks tensors, which go to `out`, and tuples."""
    if isinstance(value, Tensor):
        if name in out:
            raise ValueError(f"two tensors of the training state are named {name!r}; rename a key of one of them")
        out[name] = value
        return {"$tensor": name}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple | list):
        items = [pack(item, f"{name}.{i}", out) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: pack(item, f"{name}.{key}", out) for key, item in value.items()}
    raise ValueError(
        f"{name!r} in the training state is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        f"cannot hold; give numbers, strings, tensors, and lists, tuples and dicts of them by strings"
    )


@dataclass(frozen=True)
class Getter:
    """Read a checkpoint's values by name, into this run's `own` tensors where they fit."""

    saved: Shards
    own: Mapping[str, Tensor]

    def __call__(self, name: str) -> Any:
        text = self.saved.read(name + JSON).numpy().tobytes()
        return self.unpack(strict.parse(text, name, constants=True))

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        match next(iter(value.items()), None):
            case ("$tensor", name):
                return self.tensor(name)
            case ("$tuple", items):
                return tuple(self.unpack(item) for item in items)
        return {key: self.unpack(item) for key, item in value.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: this run's own, filled, or a new one that is divided like it."""
        own, shape, dtype = self.own.get(name), self.saved.shape(name), self.saved.dtype(name)
        if own is None or own.shape != shape:
            return self.saved.read(name)
        if own.dtype != dtype:
            own = torch.empty_like(own, dtype=dtype, requires_grad=False)
        self.saved.fill(local(own.detach()), name, box(own))
        return own


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors by plain name, without Transformer Engine's extra state, which is a pickle and is made
    again in the first steps."""
    return {plain_name(n): t for n, t in model.state_dict().items() if not n.endswith("_extra_state")}


def check_model(model: nn.Module, saved: Shards) -> None:
    """Raise a ValueError if a tensor of the model differs in the checkpoint. Frozen bfloat16 weights may be float32
    here, which holds all their values."""
    for name, tensor in weights(model).items():
        key, want, got = f"model.{name}", f"{list(tensor.shape)} {tensor.dtype}", "no such tensor"
        if key in saved.tensors:
            shape, dtype = saved.shape(key), saved.dtype(key)
            frozen = f"optimizer.state.{name}{JSON}" not in saved.tensors
            widened = frozen and dtype == torch.bfloat16 and tensor.dtype == torch.float32
            if shape == tensor.shape and (dtype == tensor.dtype or widened):
                continue
            got = f"{list(shape)} {dtype}"
        narrower = got.startswith(f"{list(tensor.shape)} ") and tensor.dtype == torch.bfloat16
        instead = ", or write model.frozen=float32" if narrower else ""
        raise ValueError(
            f"{key!r} is {want} in this run and {got} in the checkpoint; resume with the config that made the "
            f"checkpoint{instead}, or start in another folder"
        )


def fill_model(model: nn.Module, saved: Shards) -> None:
    for name, tensor in weights(model).items():
        saved.fill(local(tensor.detach()), f"model.{name}", box(tensor))


def moments(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state to continue with: the saved one in this run's dtypes, or this run's own if another
    rule made the saved one. A mean of weights may start or end."""
    if not own:
        return dict(saved)
    if own.keys() - BESIDE != saved.keys() - BESIDE:
        return dict(own)
    known = {k: saved[k] for k in own if k in saved}
    return {**own, **{k: v.to(own[k].dtype) if isinstance(v, Tensor) else v for k, v in known.items()}}


# ---- the folder


class Mirror(Protocol):
    """A copy of the checkpoints elsewhere (mirror.py)."""

    def want(self, step: Path, /) -> None:
        """Copy a checkpoint soon, in a thread."""
        ...

    def reading(self) -> set[Path]:
        """Return the checkpoints that must stay on disk."""
        ...


class Checkpoints:
    """A run's checkpoints, step-00000123 and so on. All ranks call every method together.

    keep: how many of the newest stay, in addition to multiples of keep_every (0: none).
    light: the run's last checkpoint has no moments.
    asynchronous: save returns when the state is copied to host memory; a thread writes it, and `failed` becomes true if
    it cannot. The next save waits for it; the first failure in a row is reported and tried again, the second is raised.
    load and close raise any failure.
    settings: of the run after a step, by dotted key; checkpoints store them, and `load` compares them (resume.py).
    allow: keys that may differ although they are refused otherwise.
    mirror: gets every checkpoint as soon as it is on disk; only rank 0 has one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        light: bool = False,
        asynchronous: bool = True,
        settings: Callable[[int], Mapping[str, Any]] = lambda step: {},
        allow: Sequence[str] = (),
        mirror: Mirror | None = None,
    ) -> None:
        self.folder, self.keep, self.keep_every, self.light, self.mirror = folder, keep, keep_every, light, mirror
        self.asynchronous, self.settings, self.allow = asynchronous, settings, allow
        distributed = dist.is_available() and dist.is_initialized()
        # a separate CPU group: the thread's collectives must not meet those of a training step
        self.group = dist.new_group(backend="gloo") if distributed else None
        self.rank = dist.get_rank() if distributed else 0
        self.world = dist.get_world_size() if distributed else 1
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.failures = 0  # failures in a row
        self.copies: dict[str, Tensor] = {}  # kept between saves, because pinned memory is slow to allocate

    def save(self, step: int, state: TrainState, *, last: bool = False, shown: Sequence[Tensor] = ()) -> None:
        """Save `state` at `step`. The state may change as soon as this returns. If it is the run's `last` one, only the
        tensors of `shown` may, so only these are copied, or the disk is waited for where they have no room."""
        try:
            self.wait()
        except ValueError as error:
            self.forgive(error, step)
        state.step = step
        live = state.tensors(self.rank, moments=not (last and self.light))
        parts = {name: local(tensor.detach()) for name, tensor in live.items()}
        self.check_finite(step, parts)
        if not self.asynchronous:
            staged = parts
        elif last:
            places = {tensor.data_ptr() for tensor in shown} if room_for_two(shown) else set()
            staged = {name: part.clone() if part.data_ptr() in places else part for name, part in parts.items()}
        else:
            staged = self.copy(parts)
        self.pending = self.thread.submit(self.write, step, live, staged)
        if not self.asynchronous:
            self.wait()
        elif last and shown and not places:
            wait_for([self.pending])  # its failure is left to the next call

    def check_finite(self, step: int, parts: Mapping[str, Tensor]) -> None:
        """Raise a ValueError on all ranks if a weight of any rank is not finite."""
        own = storage.not_finite({name: part for name, part in parts.items() if name.startswith("model.")})
        name = next((name for name in gather(own, self.group) if name), "")
        if name:
            older = next(iter(found(self.folder)), None)
            raise ValueError(
                f"{name.removeprefix('model.')} is not finite after step {step}, so this step is not saved; "
                f"{f'the newest checkpoint is {older}' if older else 'there is no earlier checkpoint'}; start in a new "
                "folder, or continue from there, with a lower schedule.peak or a higher optim.eps"
            )

    def load(self, state: TrainState) -> int:
        """Load the newest complete checkpoint and return its step, or 0. A damaged one is set aside. Afterwards remove
        what a killed save left behind, because a finished run does not save again."""
        self.wait()
        saved = self.newest(set_aside=True)
        if saved is None:
            return 0
        if saved.settings is not None:  # older checkpoints hold only a digest
            now = self.settings(step_of(saved.folder))
            judge(saved.folder, saved.settings, now, self.allow, warn=self.rank == 0)
        self.check_models(state, saved)
        own = state.tensors(self.rank)
        with together("save or load a checkpoint", self.group):
            try:
                state.adopt(saved, own, self.rank)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"{saved.folder} holds a state that no save wrote ({said:.200}); use another checkpoint"
                ) from error
        if self.rank == 0:
            self.prune(saved.folder)
        return state.step

    def check_models(self, state: TrainState, saved: Shards) -> None:
        """Raise a ValueError on all ranks, before anything changes, if the checkpoint belongs to another model."""
        problem = ""
        try:
            check_model(state.model, saved)
        except ValueError as error:
            problem = f"{saved.folder}: {error}"
        here = {f"model.{name}" for name in weights(state.model)}
        named = sorted(name for name in saved.tensors if name.startswith("model."))
        answers = gather((problem, "".join("01"[name in here] for name in named)), self.group)
        for problem, _ in answers:
            if problem:
                raise ValueError(problem)
        strangers = [name for name, *has in zip(named, *(has for _, has in answers), strict=True) if "1" not in has]
        if strangers:
            raise ValueError(
                f"{saved.folder} has {len(strangers)} tensors that this run's model has not, {strangers[0]!r} first; "
                f"resume with the config that made it, or start in another folder"
            )

    def mirror_again(self) -> None:
        """Copy the newest checkpoint to the mirror, in case a killed run did not."""
        newest = next(iter(found(self.folder)), None)
        if self.mirror is not None and newest is not None:
            self.mirror.want(newest)

    def latest(self) -> Shards | None:
        """Return the newest complete checkpoint after comparing every byte with its sums, or None."""
        self.wait()
        return self.newest(set_aside=False)

    def wait(self) -> None:
        """Wait until the current save is on disk. Raise its failure."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.failures += 1
            pending.result()
            self.failures = 0

    @property
    def failed(self) -> bool:
        """Return whether this rank knows that the current save failed, without waiting."""
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def settle(self, state: TrainState) -> None:
        """Wait for the last save of a run, and try again if it failed."""
        try:
            self.wait()
        except ValueError as error:
            self.forgive(error, state.step)
            self.save(state.step, state)
            self.wait()

    def forgive(self, error: ValueError, step: int) -> None:
        """Report a save's failure, or raise it if the save before failed too."""
        if self.failures > 1:
            raise error
        if self.rank == 0:
            warnings.warn(f"{error}; tries again with step {step}", stacklevel=3)

    def check_room(self, state: TrainState, saves: int) -> None:
        """Raise a ValueError if the disk has no room for the checkpoints that exist at once during saves."""
        own = storage.owned(storage.pieces(state.tensors(self.rank)), self.group)
        size, there = sum(gather(sum(piece.bytes for piece in own), self.group)), len(found(self.folder))
        problem = ""
        try:
            storage.check_free(
                self.folder, size, max(1, min(self.keep + 1 + (self.mirror is not None), there + saves) - there)
            )
        except ValueError as error:
            problem = str(error)
        if problem := gather(problem, self.group)[0]:  # the first rank writes the folder
            raise ValueError(problem)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.thread.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except ValueError as failed:
            if error is None:
                raise
            print(f"and the last checkpoint was not saved: {failed}", file=sys.stderr)

    # ---- in the thread

    def write(self, step: int, live: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + ".partial")
        facts = {"step": step, "settings": self.settings(step), "world": self.world, "torch": torch.__version__}
        try:
            storage.save(partial, facts, live, staged, self.group, lambda: self.commit(partial, final))
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def commit(self, partial: Path, final: Path) -> None:
        """Rename a finished checkpoint. Older ones are removed only after it is on disk."""
        if final.exists():  # saved again by a run that went back; one of the two always exists
            replaced = final.with_name(final.name + ".replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(partial, final)
        sync_folder(self.folder)
        if self.mirror is not None:
            self.mirror.want(final)
        self.prune(final)

    def prune(self, newest: Path) -> None:
        """Remove older checkpoints, the one that `newest` replaced, and half-written or half-removed ones."""
        replaced, paths = newest.with_name(newest.name + ".replaced"), found(self.folder)
        kept = {newest, *[path for path in paths if path != replaced][: self.keep]}
        if self.keep_every:
            kept |= {path for path in paths if step_of(path) % self.keep_every == 0 and path != replaced}
        if self.mirror is not None:
            kept |= self.mirror.reading()
        for path in paths:
            if path not in kept:
                removed = path.with_name(path.name.partition(".")[0] + ".removed")
                shutil.rmtree(removed, ignore_errors=True)
                os.rename(path, removed)  # so that a kill leaves no half checkpoint under its name
        remove_waste(self.folder)

    # ---- all ranks together

    def newest(self, *, set_aside: bool) -> Shards | None:
        """Return the newest complete checkpoint."""
        bad: list[Path] = []
        names: list[str] = gather([path.name for path in found(self.folder)], self.group)[0]
        for folder in map(self.folder.joinpath, names):
            manifest, problem = self.read(folder)
            if manifest is not None:
                if set_aside and self.rank == 0:
                    for path in bad:  # or it would be found and kept again
                        os.rename(path, free_name(path.with_name(path.name + ".damaged")))
                return Shards(folder, manifest)
            if self.rank == 0:
                warnings.warn(f"checkpoint {folder.name} is not used: {problem}; trying the one before", stacklevel=3)
            bad.append(folder)
        if bad:
            raise ValueError(
                f"none of the {len(bad)} checkpoints in {self.folder} is whole ({problem}); bring one back from a "
                f"copy, or remove them to start from step 0"
            )
        return None

    def read(self, folder: Path) -> tuple[Manifest | None, str]:
        """Return a checkpoint's manifest, or None and why it is damaged. Each rank checks its share of the files."""
        manifest, problem = None, ""
        try:
            manifest = storage.read_whole(folder, slice(self.rank, None, self.world))
        except (OSError, ValueError) as error:
            problem = str(error)
        problem = next((problem for problem in gather(problem, self.group) if problem), "")
        return None if problem else manifest, problem

    def copy(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's parts to host memory, all at once, with one wait for the device."""
        copies = {}
        for name, part in parts.items():
            old = self.copies.get(name)
            if old is None or old.shape != part.shape or old.dtype != part.dtype:
                old = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            copies[name] = old.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.copies = copies
        return copies


def room_for_two(tensors: Sequence[Tensor]) -> bool:
    """Return whether their GPU has room for two copies of tensors: a save's, and that of a view of the weights."""
    size = sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
    return not size or torch.cuda.mem_get_info(tensors[0].device)[0] >= 2 * size


def found(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, complete or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if STEP.fullmatch(path.name)]
    return sorted(named, key=lambda path: (-step_of(path), path.name))


def remove_waste(folder: Path) -> None:
    """Remove half-written and half-removed checkpoints of a folder, which need not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if WASTE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("step-"))


def free_name(path: Path) -> Path:
    names: Iterator[Path] = (path.with_name(f"{path.name}{i or ''}") for i in range(1 << 30))
    return next(name for name in names if not name.exists())
