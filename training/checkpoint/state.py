"""All that a run needs to go on as if it had never stopped, and the folder where it is kept.

A checkpoint loads on any other mesh (DCP plans that), and our storage (storage.py) holds it: a tensor is a safetensors
tensor, anything else (a step, a learning rate, a betas tuple) is its JSON text as a tensor of bytes. No
pickle is written or read, so a checkpoint is data and cannot run code; its sums tell a damaged one from a whole one.
An optimizer is saved by parameter names, not by its numbering, and into its `state` directly, because
Optimizer.load_state_dict would round fp32 moments to a bf16 parameter's type.

    with Stop() as stop, Checkpoints(folder, keep=3) as checkpoints:
        state.step = checkpoints.load(state)          # 0 if there is none
        while state.step < steps and not stop.requested():
            ...
            if state.step % every == 0: checkpoints.save(state.step, state)
        checkpoints.save(state.step, state)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from training.checkpoint import storage
from training.checkpoint.storage import Reader, check_free, read_whole
from training.config.resume import judge
from training.model.names import plain_name
from training.parallel.collectives import gather, local
from upcycle.io import strict
from upcycle.io.disk import sync_folder

BESIDE = {"mean", "has", "unsent"}  # of a parameter, what no rule of an update needs: a mean, what an island keeps
JSON = ".json"  # ends the name of a value that is kept as text
STEP = re.compile(r"step-(\d{8,})(\.replaced)?", re.ASCII)
WASTE = re.compile(r"step-\d{8,}\.(partial|removed)", re.ASCII)


class Part(Protocol):
    """Anything that a resume needs: the data's cursor, the balance biases, the spike guard, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Rng:
    """The generators of this process. Every rank has its own, so they are kept per rank."""

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
    """What a checkpoint holds. Tensors may be DTensors; other values are alike on all ranks, except rng."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    step: int = 0
    parts: dict[str, Part] = field(default_factory=dict)  # the same on all ranks
    rng: Rng = field(default_factory=Rng)

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Everything, by name."""
        out = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        put(out, "step", self.step)
        for name, group in self.groups().items():
            put(out, f"optimizer.group.{name}", {k: v for k, v in group.items() if k != "params"})
        for name, (optimizer, parameter) in self.trained().items():
            if parameter in optimizer.state:
                put(out, f"optimizer.state.{name}", optimizer.state[parameter])
        for name, part in self.named_parts(rank).items():
            put(out, name, part.state_dict())
        return out

    def places(self, saved: Mapping[str, TensorStorageMetadata], rank: int) -> dict[str, Tensor]:
        """The tensors to read into: the model's own, and for all the rest new ones, sharded as what they belong to."""
        own = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        out: dict[str, Tensor] = {}
        for name, tensor in own.items():
            check_same(name, tensor, saved)
            out[name] = tensor
        trained = self.trained()
        parts = self.named_parts(rank)
        fresh: dict[str, Tensor] = {}
        for name, part in parts.items():
            put(fresh, name, part.state_dict())
        for name, entry in saved.items():
            kind, _, rest = name.partition(".")
            if name.endswith(JSON):
                if kind != "rank" or rest.partition(".")[0] == f"{rank}":
                    out[name] = torch.empty(entry.size, dtype=torch.uint8)
            elif name.startswith("optimizer.state."):
                inner = name.removeprefix("optimizer.state.")
                owner = longest_prefix(inner, trained)
                if owner is not None:  # else another pipeline stage trains it
                    out[name] = moment(inner, owner, entry, *trained[owner])
            elif kind != "model" and (kind == "optimizer" or any(name.startswith(part + ".") for part in parts)):
                like = fresh.get(name)
                out[name] = (
                    torch.empty_like(like, dtype=entry.properties.dtype)
                    if like is not None and like.shape == entry.size
                    else torch.empty(entry.size, dtype=entry.properties.dtype)
                )
        return out

    def adopt(self, loaded: Mapping[str, Tensor], rank: int, source: Path) -> None:
        """Takes over what was read into `places`; the model's own tensors have it already."""
        self.step = get(loaded, "step")
        for name, group in self.groups().items():
            if f"optimizer.group.{name}{JSON}" not in loaded:
                raise ValueError(
                    f"{source} has no optimizer group {name!r}; resume with the optimizer settings that made it"
                )
            for key, value in get(loaded, f"optimizer.group.{name}").items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # a learning rate in a tensor is one that a compiled step holds on to
                else:
                    group[key] = value
        for name, (optimizer, parameter) in self.trained().items():
            own, saved = optimizer.state.get(parameter, {}), dict[str, Any]()
            if f"optimizer.state.{name}{JSON}" in loaded:  # else it was frozen, and its moments start anew
                saved = get(loaded, f"optimizer.state.{name}")
                own = optimizer.state[parameter]
                own.update(moments(own, saved))  # in place, for the optimizer may hold on to it
            if "mean" in own and "mean" not in saved:  # as if the steps that are counted had all had these weights
                own["mean"].copy_(own.get("master", parameter).detach())
        for name, part in self.named_parts(rank).items():
            if name + JSON in loaded:
                part.load_state_dict(get(loaded, name))
            else:
                warnings.warn(f"{source} has no {name!r}, which starts anew: this resume is not bitwise", stacklevel=3)
        for name in loaded:
            if (
                name.startswith("part.")
                and name.endswith(JSON)
                and name.removesuffix(JSON) not in self.named_parts(rank)
            ):
                warnings.warn(f"{source} has {name.removesuffix(JSON)!r}, which this run has no use for", stacklevel=3)

    def groups(self) -> dict[str, dict[str, Any]]:
        """The optimizers' groups by `name`, which is the same on all pipeline stages; a group's number may not be."""
        named = [
            (str(group.get("name", f"{i}.{j}")), group)
            for i, optimizer in enumerate(self.optimizers)
            for j, group in enumerate(optimizer.param_groups)
        ]
        names = [name for name, _ in named]
        assert len(set(names)) == len(names), f"optimizer groups share a name: {names}"
        return dict(named)

    def trained(self) -> dict[str, tuple[Optimizer, nn.Parameter]]:
        owner = {p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        names = {plain_name(n): (owner[p], p) for n, p in self.model.named_parameters() if p in owner}
        assert len(names) == len(owner), "an optimizer holds a parameter that is not the model's"
        return names

    def named_parts(self, rank: int) -> dict[str, Part]:
        return {f"part.{name}": part for name, part in self.parts.items()} | {f"rank.{rank}.rng": self.rng}


# ---- values as tensors


def put(out: MutableMapping[str, Tensor], name: str, value: Any) -> None:
    """Puts a value into `out`: its tensors under names of their own, and the rest as JSON text in a tensor of bytes."""
    text = json.dumps(pack(value, name, out)).encode()
    out[name + JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def get(loaded: Mapping[str, Tensor], name: str) -> Any:
    return unpack(strict.parse(loaded[name + JSON].numpy().tobytes(), name, constants=True), loaded)


def pack(value: Any, name: str, out: MutableMapping[str, Tensor]) -> Any:
    """JSON knows no tensor, tuple or key that is not a string; those are marked with a $."""
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
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack(item, f"{name}.{key}", out) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {"$dict": [[pack(k, f"{name}.{i}.key", out), pack(v, f"{name}.{i}", out)] for i, (k, v) in pairs]}
    raise ValueError(
        f"{name!r} in the training state is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        f"cannot hold; give numbers, strings, tensors, and lists, tuples and dicts of them"
    )


def unpack(value: Any, loaded: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [unpack(item, loaded) for item in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tensor", name):
            return loaded[name]
        case ("$tuple", items):
            return tuple(unpack(item, loaded) for item in items)
        case ("$dict", pairs):
            return {unpack(k, loaded): unpack(v, loaded) for k, v in pairs}
    return {key: unpack(item, loaded) for key, item in value.items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by plain name, without Transformer Engine's extra state: that is a pickle, and is made again
    in the first steps."""
    return {plain_name(n): t for n, t in model.state_dict().items() if not n.endswith("_extra_state")}


def check_same(name: str, tensor: Tensor, checkpoint: Mapping[str, TensorStorageMetadata]) -> None:
    saved = checkpoint.get(name)
    frozen = f"optimizer.state.{name.removeprefix('model.')}{JSON}" not in checkpoint  # in the run that made it
    # DCP would cast without a word
    want = f"{list(tensor.shape)} {tensor.dtype}"
    got = "no such tensor" if saved is None else f"{list(saved.size)} {saved.properties.dtype}"
    if (
        saved is None
        or saved.size != tensor.shape
        or not (
            saved.properties.dtype == tensor.dtype or (frozen and within_dtype(saved.properties.dtype, tensor.dtype))
        )
    ):
        narrower = saved is not None and saved.size == tensor.shape and tensor.dtype == torch.bfloat16
        instead = ", or write model.frozen=float32" if narrower else ""
        raise ValueError(
            f"{name!r} is {want} in this run and {got} in the checkpoint; resume with the config that made the "
            f"checkpoint{instead}, or start in another folder"
        )


def within_dtype(saved: torch.dtype, own: torch.dtype) -> bool:
    """Whether `own` has every number of `saved`: frozen weights may be bfloat16, and be read as what learns is held."""
    return saved == torch.bfloat16 and own == torch.float32


def moment(
    name: str, owner: str, saved: TensorStorageMetadata, optimizer: Optimizer, parameter: nn.Parameter
) -> Tensor:
    """The tensor to read an optimizer's tensor into: the optimizer's own if it fits, else a new one, sharded as its
    parameter."""
    key, dtype = name.removeprefix(owner + "."), saved.properties.dtype
    there = optimizer.state.get(parameter, {}).get(key)
    if isinstance(there, Tensor) and there.shape == saved.size and there.dtype == dtype:
        return there  # a resume needs no second copy of the moments
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if key == "step":  # torch's rule: on the device only if the kernel reads it there
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(saved.size, dtype=dtype, device=parameter.device if on_device else "cpu")
    if saved.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=dtype, device=parameter.device)


def moments(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state to go on with: what was saved, in the dtypes that the optimizer has; its own, where another rule made
    what was saved. An optimizer that has none yet takes what was saved as it is. A mean of weights may begin or end."""
    if not own:
        return dict(saved)
    if own.keys() - BESIDE != saved.keys() - BESIDE:
        return dict(own)
    known = {k: saved[k] for k in own if k in saved}
    return {**own, **{k: v.to(own[k].dtype) if isinstance(v, Tensor) else v for k, v in known.items()}}


def longest_prefix(name: str, names: Mapping[str, Any]) -> str | None:
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


# ---- the folder


class Checkpoints:
    """A run's checkpoints: step-00000123 and so on. Every method is for all ranks at once.

    keep: the newest so many stay, beside every one whose step is a multiple of keep_every (0: none).
    asynchronous: save returns when the state is copied to host memory; a thread writes it, and `failed` is true as soon
    as it could not. The next save waits for it: the first failure in a row is said, for that save tries again, and the
    second is raised. load and close raise any.
    settings: of the run after a step, by dotted key; a checkpoint holds them, and `load` compares (resume.py). allow:
    keys that may differ although they are refused otherwise.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        asynchronous: bool = True,
        settings: Callable[[int], Mapping[str, Any]] = lambda step: {},
        allow: Sequence[str] = (),
    ) -> None:
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self.asynchronous, self.settings, self.allow = asynchronous, settings, allow
        distributed = dist.is_available() and dist.is_initialized()
        # a group of its own, on the processor: the thread's collectives must not meet those of a training step
        self.group = dist.new_group(backend="gloo") if distributed else None
        self.owners = storage.Owners(self.group)
        self.rank = dist.get_rank() if distributed else 0
        self.world = dist.get_world_size() if distributed else 1
        # DCP's remark that it works in one process; for good, because a filter that comes and goes is not thread-safe
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.failures = 0  # in a row
        self.copies: dict[str, Tensor] = {}  # kept between saves: pinned memory is slow to get

    def save(self, step: int, state: TrainState) -> None:
        """Keep `state` as of `step`. The state may change as soon as this returns."""
        try:
            self.wait()
        except ValueError as error:
            self.forgive(error, step)
        state.step = step
        live = state.tensors(self.rank)
        staged = self.copy(live) if self.asynchronous else held(live)
        self.pending = self.thread.submit(self.write, step, live, staged)
        if not self.asynchronous:
            self.wait()

    def load(self, state: TrainState) -> int:
        """Take up the newest whole checkpoint, and return its step; 0 if there is none. A damaged one is set aside.
        What a kill kept the last save from removing goes once the state is taken up: at its end a run saves no more."""
        self.wait()
        found = self.newest(set_aside=True)
        if found is None:
            return 0
        folder, manifest = found
        if "settings" in manifest:  # older checkpoints hold a digest of them only
            settings = self.settings(step_of(folder))
            judge(folder, manifest["settings"], settings, self.allow, warn=self.rank == 0)
        reader = Reader(folder, manifest)
        saved: Any = reader.metadata.state_dict_metadata
        places: dict[str, Tensor] = {}
        problem = None
        try:
            places = state.places(saved, self.rank)
        except ValueError as error:
            problem = f"{folder}: {error}"
        named = sorted(name for name in saved if name.startswith("model."))
        answers = self.gather((problem, "".join("01"[name in places] for name in named)))  # no rank goes on alone
        for problem, _ in answers:
            if problem:
                raise ValueError(problem)
        strangers = {name for name, *has in zip(named, *(has for _, has in answers), strict=True) if "1" not in has}
        if strangers:
            raise ValueError(
                f"{folder} has {len(strangers)} tensors that this run's model has not, {min(strangers)!r} first; "
                f"resume with the config that made it, or start in another folder"
            )
        reader.want(places)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        problem = None
        try:  # each rank by itself: what it reads follows from the manifest, and DCP would send all plans to rank 0
            with first_reason(self.rank):
                load(places, storage_reader=reader, planner=planner, no_dist=True)
        except ValueError as error:
            problem = str(error)
        if problem := next((each for each in self.gather(problem) if each), None):
            raise ValueError(problem)
        try:
            state.adopt(places, self.rank, folder)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{folder} holds a state that no save wrote ({said:.200}); where is this checkpoint from?"
            ) from error
        if self.rank == 0:
            self.prune(folder)
        return state.step

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, every byte of it read and compared; None if there is none at all."""
        self.wait()
        found = self.newest(set_aside=False)
        return None if found is None else found[0]

    def wait(self) -> None:
        """Waits until the save in flight is on the disk. Raises what stopped it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.failures += 1
            pending.result()
            self.failures = 0

    @property
    def failed(self) -> bool:
        """Whether it is known on this rank that the save in flight could not be made. Nothing waits."""
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def settle(self, state: TrainState) -> None:
        """Waits for the last save of a run, and tries once more if it could not be made."""
        try:
            self.wait()
        except ValueError as error:
            self.forgive(error, state.step)
            self.save(state.step, state)
            self.wait()

    def forgive(self, error: ValueError, step: int) -> None:
        """Says what stopped a save, if the one before it was made; else raises it."""
        if self.failures > 1:
            raise error
        if self.rank == 0:
            warnings.warn(f"{error}; tries again with step {step}", stacklevel=3)

    def check_room(self, state: TrainState, saves: int) -> None:
        """Raises a ValueError if the disk has no room for the checkpoints that lie there at once during some saves."""
        tensors = state.tensors(self.rank)
        own = {name: t.numel() * t.element_size() for name, t in tensors.items() if not name.startswith("rank.")}
        # a sharded tensor counts as a whole, and once: ranks with the same names hold parts or copies of the same ones
        stage = hashlib.sha256("".join(sorted(own)).encode()).hexdigest()
        size = sum(dict(map(tuple, self.gather([stage, sum(own.values())]))).values())
        there = len(self.found())
        problem = ""
        try:
            check_free(self.folder, size, max(1, min(self.keep + 1, there + saves) - there))
        except ValueError as error:
            problem = str(error)
        if problem := self.gather(problem)[0]:  # the first rank writes the folder
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

    # what the thread does

    def write(self, step: int, live: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + ".partial")
        facts = {"step": step, "settings": self.settings(step), "world": self.world, "torch": torch.__version__}
        try:
            storage.save(partial, facts, live, staged, self.owners, lambda: self.commit(partial, final))
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def commit(self, partial: Path, final: Path) -> None:
        """Renames a checkpoint, from when on it counts. Older ones are removed only after it is on the disk."""
        if final.exists():  # saved again, by a run that went back further; never a moment without one of the two
            replaced = final.with_name(final.name + ".replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(partial, final)
        sync_folder(self.folder)
        self.prune(final)

    def prune(self, newest: Path) -> None:
        """Removes older checkpoints, the one that `newest` replaced, and what is half written or half removed."""
        replaced = newest.with_name(newest.name + ".replaced")
        counting = [path for path in self.found() if path != replaced]
        for path in self.found():
            every = self.keep_every and step_of(path) % self.keep_every == 0
            if path == replaced or not (path in counting[: self.keep] or path == newest or every):
                removed = path.with_name(path.name.partition(".")[0] + ".removed")
                shutil.rmtree(removed, ignore_errors=True)
                os.rename(path, removed)  # so that a kill in the middle leaves no half of a checkpoint
        for path in self.folder.iterdir():
            if WASTE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def found(self) -> list[Path]:
        return found(self.folder)

    # what all ranks do together

    def newest(self, *, set_aside: bool) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its manifest."""
        bad: list[Path] = []
        names: list[str] = self.gather([path.name for path in self.found()])[0]
        for folder in map(self.folder.joinpath, names):
            manifest, problem = read_whole(folder, slice(self.rank, None, self.world))
            problem = next((problem for problem in self.gather(problem) if problem), None)
            if problem is None:
                if set_aside and self.rank == 0:
                    for path in bad:  # or it would count as one to keep, and be found again
                        os.rename(path, free_name(path.with_name(path.name + ".damaged")))
                return folder, manifest
            if self.rank == 0:
                warnings.warn(f"checkpoint {folder.name} is not used: {problem}; trying the one before", stacklevel=3)
            bad.append(folder)
        if bad:
            raise ValueError(
                f"none of the {len(bad)} checkpoints in {self.folder} is whole ({problem}); bring one back from a "
                f"copy, or remove them to start from step 0"
            )
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.group is None else gather(value, self.group)

    def copy(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's part of each tensor, in host memory; all at once, so one wait for the device."""
        copies = {}
        for name, part in held(live).items():
            old = self.copies.get(name)
            if old is None or old.shape != part.shape or old.dtype != part.dtype:
                old = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            copies[name] = old.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.copies = copies
        return copies


@contextmanager
def first_reason(rank: int) -> Iterator[None]:
    """Context that raises the reason of DCP's exception, a table of tracebacks by rank, on a rank that works without
    the others, which DCP calls 0."""
    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        if isinstance(reason, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        if isinstance(reason, OSError | ValueError):
            raise ValueError(f"rank {rank} could not save or load a checkpoint: {reason}") from error
        raise


def held(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor."""
    return {name: local(tensor.detach()) for name, tensor in live.items()}


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; whole or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if STEP.fullmatch(path.name)]
    return sorted(named, key=lambda path: (-step_of(path), path.name))


def step_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("step-"))


def free_name(path: Path) -> Path:
    names: Iterator[Path] = (path.with_name(f"{path.name}{i or ''}") for i in range(1 << 30))
    return next(name for name in names if not name.exists())


# ---- stopping


class Stopped(BaseException):
    """The run was asked to stop, and saved `step`. No Exception: nothing that a suite calls may handle it."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class Stop:
    """SIGTERM or SIGINT asks the loop to save and end, after this step or this batch of a validation; a second one ends
    the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Stop:
        self.before = {number: signal.signal(number, self.handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        # os.write: print may be what was interrupted
        os.write(2, f"\n{self.signal.name}: saving, then leaving; once more to stop at once\n".encode())

    def requested(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether to end. With a gloo group: whether any of its ranks was asked to, so that all agree."""
        return anywhere([self.signal is not None], group)[0]

    def poll(self, group: dist.ProcessGroup | None = None) -> None:
        """Raises Stopped where `requested` is true; for work that is longer than a step."""
        if self.requested(group):
            raise Stopped


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Which of the flags are true on any rank of a gloo group."""
    if group is None:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]
