"""A checkpoint gives back every bit, survives a kill at any moment, and a damaged one is noticed and passed over."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.parallel import ranks
from tests.parallel.ranks import forked
from training.checkpoint import storage
from training.checkpoint.state import Checkpoints, TrainState
from training.checkpoint.storage import MANIFEST, SAFETENSORS, read_manifest
from training.optim.config import OptimConfig
from training.optim.guard import SpikeGuard
from training.optim.optimizer import Optimizer as OurOptimizer
from training.run.stop import Stop
from upcycle.io import disk

SERVER = forked()


class Box:
    """A part whose state is whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Weights(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


def small(step: int = 0, **parts: Any) -> TrainState:
    """A state of which every number says which step it is of."""
    model = Weights(w=torch.full((3, 4), float(step)), b=torch.full((2,), step, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + step)
    state = TrainState(model, [optimizer], step, {name: Box(value) for name, value in parts.items()})
    if step:
        for parameter in model.parameters():
            moments = {"exp_avg": torch.full(parameter.shape, step + 0.25), "step": torch.tensor(float(step))}
            optimizer.state[parameter] = moments
    return state


def same(state: TrainState, step: int) -> bool:
    """Bit for bit what `small(step)` is, but for the generators."""
    got, want = state.tensors(0), small(step, **{name: part.value for name, part in state.parts.items()}).tensors(0)
    for name in [name for name in got if name.startswith("rank")]:
        got.pop(name), want.pop(name)
    return got.keys() == want.keys() and all(equal(got[name], want[name]) for name in want)


def equal(a: Tensor, b: Tensor) -> bool:
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def saved(folder: Path, *steps: int, **options: Any) -> Path:
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, small(step))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loaded(folder: Path) -> TrainState:
    state = small()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(state) == state.step
    return state


def test_a_last_checkpoint_without_moments_keeps_masters(tmp_path: Path) -> None:
    """A weight that is stored in bfloat16 has its float32 master among the optimizer's values."""
    state = small(4)
    _, narrow = state.model.parameters()
    state.optimizers[0].state[narrow]["master"] = torch.full(narrow.shape, 4.25)
    for name, light in (("all", False), ("weights", True)):
        with Checkpoints(tmp_path / name, light=light) as checkpoints:
            checkpoints.save(4, state, last=True)
    every, kept = (set(read_manifest(tmp_path / name / "step-00000004")["tensors"]) for name in ("all", "weights"))
    assert every - kept == {"optimizer.state.w.exp_avg", "optimizer.state.w.step"} and kept < every


# ---- every bit


def test_all_types_and_shapes_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Any bits at all: NaNs with a payload, denormals, both zeros; scalars, nothing, and a transposed view."""

    def anything(seed: int) -> dict[str, Tensor]:
        generator, out = torch.Generator().manual_seed(seed), {}
        for dtype_name in SAFETENSORS:
            dtype = getattr(torch, dtype_name, None)
            for shape in ((), (0,), (0, 3), (3, 5), (2, 1, 4)) if isinstance(dtype, torch.dtype) else ():
                high = 2 if dtype == torch.bool else 256
                size = int(np.prod(shape)) * dtype.itemsize
                raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
                out[f"{dtype_name}-{len(shape)}-{raw.numel()}"] = raw.view(dtype).reshape(shape)
        out["view"] = torch.randn(4, 6, generator=generator).T[1::2]
        return out

    wrote, model = anything(1), Weights(w=torch.zeros(1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model, [], parts={"box": Box(wrote)}))
        box = Box()
        checkpoints.load(TrainState(model, [], parts={"box": box}))
    assert len(wrote) > 50 and box.value.keys() == wrote.keys()
    assert all(equal(box.value[name], wrote[name]) for name in wrote)
    other = anything(2)
    assert not all(equal(box.value[name], other[name]) for name in wrote)


def test_python_values_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "numbers": [0, -1, 10**40, 0.1, -0.0, 1e-310, float("inf"), True, None], "tuple": (0.9, (0.999,), []),
        "text": "ñ☃\n\x00", "": {}, "tensor": {"deep": [torch.tensor(3, dtype=torch.int16)]},
    }  # fmt: skip
    state = small(0, box=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1, box=value))
        checkpoints.load(state)
    assert repr(state.parts["box"].value) == repr(value)  # repr, because -0.0 == 0 and True == 1


@pytest.mark.parametrize("value", [np.float64(1), print, {1, 2}, b"bytes", torch.float32, {1: 2}, {"$tensor": "x"}])
def test_what_json_cannot_hold_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"'part\.box\.value\.0' .* cannot hold"):
        checkpoints.save(1, small(1, box=[value]))
    assert not tmp_path.exists() or names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", torch.bfloat16), ("adamw", torch.float32), ("muon", torch.bfloat16)]
)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Masters, moments, skipped steps, the guard's statistics, and the generators that dropout and Python draw from."""

    def run() -> tuple[TrainState, Callable[[], None]]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 4)).to(dtype)
        config = OptimConfig(name=name)
        optimizer, guard = OurOptimizer(config, model.named_parameters()), SpikeGuard(config)

        def step() -> None:
            loss = model(torch.randn(4, 6, dtype=dtype) + random.random()).float().square().mean()
            loss.backward()
            guard.spike(loss.detach(), optimizer.clip())
            optimizer.step(0.1, torch.rand(()) < 0.3)
            optimizer.zero_grad()

        return TrainState(model, [optimizer], parts={"guard": guard}), step

    state, step = run()
    for _ in range(5):
        step()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state)
        for _ in range(5):
            step()
        want = {name: tensor.clone() for name, tensor in state.tensors(0).items()}
        resumed, step = run()
        assert checkpoints.load(resumed) == 5
    for _ in range(5):
        step()
    got = resumed.tensors(0)
    assert got.keys() == want.keys() and [n for n in want if not equal(got[n], want[n])] == []
    assert any(".master" in name for name in want) == (dtype == torch.bfloat16)
    step()
    assert not equal(resumed.tensors(0)["model.0.weight"], want["model.0.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_resumes_bit_for_bit_while_it_trains_on(tmp_path: Path) -> None:
    """The copy to pinned memory has ended when save returns: the next steps, queued at once, do not get into it."""

    def run() -> tuple[TrainState, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Dropout(0.3)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
            optimizer.step()

        return TrainState(model, [optimizer]), step

    state, step = run()
    step()
    with Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2, 3):  # the second and third into the first one's buffers
            step()
            checkpoints.save(number, state)
        assert all(copy.is_pinned() for name, copy in checkpoints.copies.items() if state.tensors(0)[name].is_cuda)
        for _ in range(3):
            step()
        want = state.tensors(0)
        resumed, step = run()
        step()  # has moments already: those are filled
        moments = resumed.optimizers[0].state[resumed.model[0].weight]["exp_avg"].data_ptr()
        assert checkpoints.load(resumed) == 3
    assert resumed.optimizers[0].state[resumed.model[0].weight]["exp_avg"].data_ptr() == moments
    for _ in range(3):
        step()
    got = resumed.tensors(0)
    assert got.keys() == want.keys() and [n for n in want if not equal(got[n].cpu(), want[n].cpu())] == []


def test_moments_of_another_dtype_are_those_that_the_next_update_uses(tmp_path: Path) -> None:
    def made(moments: str) -> tuple[OurOptimizer, TrainState]:
        layer = nn.Linear(2, 1, bias=False)
        optimizer = OurOptimizer(OptimConfig(moments=moments), layer.named_parameters())
        return optimizer, TrainState(layer, [optimizer])

    before, state = made("float32")
    before.slots[0].state["exp_avg"].fill_(1 / 3)
    optimizer, resumed = made("bfloat16")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.load(resumed)
    assert equal(optimizer.slots[0].state["exp_avg"], torch.full((1, 2), 1 / 3).bfloat16())


def test_a_compiled_layer_keeps_its_name(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model = small(2).model
    wrapped = TrainState(nn.Module(), [])
    wrapped.model.add_module("_orig_mod", model)  # as torch.compile does
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(wrapped)
    assert equal(model.w, small(1).model.w)


def test_shards_are_safetensors_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    folder = saved(tmp_path, 4) / "step-00000004"
    assert names(folder) == [MANIFEST, "shard-00000.safetensors"]
    with safe_open(folder / "shard-00000.safetensors", "pt") as file:
        assert equal(file.get_tensor("model.w"), small(4).model.w)
        assert json.loads(file.get_tensor("step.json").numpy().tobytes()) == 4
    manifest = read_manifest(folder)
    assert manifest["step"] == 4 and manifest["tensors"]["model.b"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("last", [False, True])
def test_a_large_shard_is_several_files_and_each_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    monkeypatch.setattr(storage, "LARGE", 4)  # bytes
    monkeypatch.setattr(storage.os, "cpu_count", lambda: 3)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small(step), last=last)
    files = ["shard-00000-1.safetensors", "shard-00000-2.safetensors", "shard-00000.safetensors"]
    assert names(tmp_path / "step-00000002") == [MANIFEST, *files]
    assert same(loaded(tmp_path), 2)
    for file in files:
        flip(tmp_path / "step-00000002" / file)
        with Checkpoints(tmp_path) as checkpoints, pytest.warns(UserWarning, match=rf"step-00000002 .*{file}.*before"):
            newest = checkpoints.latest()
        assert newest is not None and newest.folder == tmp_path / "step-00000001"
        flip(tmp_path / "step-00000002" / file)
    assert same(loaded(tmp_path), 2)


# ---- asynchronous


def test_a_save_keeps_the_moment_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go = storage.write_shard, threading.Event()
    monkeypatch.setattr(storage, "write_shard", lambda *given: (go.wait(10), write(*given))[1])

    state = small(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with torch.no_grad():
            state.model.w.add_(5)  # training goes on
        go.set()
    assert same(loaded(tmp_path), 1)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_error_of_the_thread_is_raised_by_the_next_call(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    with Checkpoints(tmp_path, asynchronous=asynchronous) as checkpoints:
        with monkeypatch.context() as broken:
            broken.setattr(disk, "write_all", no_space)
            if asynchronous:
                checkpoints.save(2, small(2))
                while not checkpoints.failed:
                    time.sleep(0.01)
                said = r"rank 0 could not save .* No space left .*step-00000002.partial/shard-00000.safetensors"
                with pytest.warns(UserWarning, match=said + ".*; tries again with step 3"):
                    checkpoints.save(3, small(3))
                with pytest.raises(ValueError, match=r"rank 0 could not save .* No space left .*step-00000003"):
                    checkpoints.save(4, small(4))
            else:
                with pytest.raises(ValueError, match=r"rank 0 could not save .* No space left"):
                    checkpoints.save(2, small(2))
        assert names(tmp_path) == ["step-00000001"]
        assert not checkpoints.failed
        checkpoints.save(4, small(4))  # and it is raised once
    assert same(loaded(tmp_path), 4)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_close_raises_too_unless_something_else_is_being_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk, "write_all", no_space)
    with pytest.raises(ValueError, match="No space left"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1))
    with pytest.raises(KeyError, match="first"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1))
        raise KeyError("first")
    assert "not saved: rank 0 could not save" in capsys.readouterr().err


def test_too_little_space_is_one_sentence_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 2, keep=1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with monkeypatch.context() as full:
            usage = shutil.disk_usage(tmp_path)
            full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=storage.SPARE + 10))
            checkpoints.save(3, small(3))
            with pytest.raises(ValueError, match=r"does not fit into .*; make room") as error:
                checkpoints.wait()
        assert "\n" not in str(error.value) and names(tmp_path) == ["step-00000002"]
        checkpoints.save(3, small(3))
    assert names(tmp_path) == ["step-00000003"]


# ---- retention


def test_the_newest_and_every_tenth_stay(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.partial").mkdir()
    (tmp_path / "other").mkdir()
    saved(tmp_path, *range(8, 25), keep=2, keep_every=10)
    assert names(tmp_path) == ["other", "step-00000010", "step-00000020", "step-00000023", "step-00000024"]


def test_who_goes_on_removes_what_a_kill_left(tmp_path: Path) -> None:
    """Also at its end, when no save comes that would; not a run that is refused, and not what reads."""
    saved(tmp_path, 1, 2, 3, 4, keep=4, settings=lambda _: {"seed": 1})
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000004.replaced")
    for half in ("step-00000001.removed", "step-00000005.partial"):
        (tmp_path / half).mkdir()
        (tmp_path / half / "shard-00000.safetensors").write_bytes(b"half")
    there = names(tmp_path)
    with Checkpoints(tmp_path, keep=2, settings=lambda _: {"seed": 2}) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None and newest.folder == tmp_path / "step-00000004"
        with pytest.raises(ValueError, match="seed"):
            checkpoints.load(small())
    assert names(tmp_path) == there
    with Checkpoints(tmp_path, keep=2, keep_every=2, settings=lambda _: {"seed": 1}) as checkpoints:
        assert checkpoints.load(small()) == 4
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 5, keep=1)
    state = small(5)
    with torch.no_grad():
        state.model.w.fill_(-1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state)
    assert names(tmp_path) == ["step-00000005"] and loaded(tmp_path).model.w[0, 0] == -1
    saved(tmp_path, 3, keep=1)  # what was just saved stays, whatever lies there
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def test_a_kill_while_a_step_is_replaced_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 5, keep=1)
    rename, calls = os.rename, []

    def dies_at_the_second(a: Path, b: Path) -> None:
        if str(b).startswith(str(tmp_path / "step")) and a.is_dir():
            calls.append(b.name)
            if len(calls) == 2:
                raise KeyboardInterrupt
        rename(a, b)

    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", dies_at_the_second)
        with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(5, small(5))
    assert calls == ["step-00000005.replaced", "step-00000005"]
    assert same(loaded(tmp_path), 5)
    saved(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-00000006"]


# ---- damage


def damage(folder: Path) -> str:
    try:
        storage.read_whole(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1 << 3
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "missing": lambda path: path.unlink(),
    "folder": lambda path: (path.unlink(), path.mkdir())[0],
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", [MANIFEST, "shard-00000.safetensors"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(file: str, kind: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(loaded(tmp_path), 3)
    DAMAGE[kind](tmp_path / "step-00000003" / file)
    with Checkpoints(tmp_path) as checkpoints, pytest.warns(UserWarning, match=rf"step-00000003 .*{file}.*before"):
        newest = checkpoints.latest()
        assert newest is not None and newest.folder == tmp_path / "step-00000002"
    with pytest.warns(UserWarning, match=rf"step-00000003 is not used: .*{file}"):
        assert same(loaded(tmp_path), 2)
    # out of the way, and does not count as one to keep
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003.damaged"]
    saved(tmp_path, 3, 4, keep=1)
    assert names(tmp_path) == ["step-00000003.damaged", "step-00000004"]


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    folder, choose = saved(tmp_path, 1) / "step-00000001", random.Random(1)
    assert not damage(folder)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in choose.sample(range(len(whole) * 8), 60):
            broken = bytearray(whole)
            broken[at // 8] ^= 1 << at % 8
            path.write_bytes(broken)
            assert path.name in damage(folder), at
        path.write_bytes(whole)
    assert not damage(folder)


def test_all_damaged_is_not_a_fresh_start(tmp_path: Path) -> None:
    for path in saved(tmp_path, 1, 2).glob("*/shard*"):
        flip(path)
    state = small(9)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="none of the 2"),
    ):
        checkpoints.load(state)
    assert same(state, 9) and names(tmp_path) == ["step-00000001", "step-00000002"]


def test_nothing_there_is_step_0(tmp_path: Path) -> None:
    state = small(9)
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.latest() is None and checkpoints.load(state) == 0
    assert same(state, 9) and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change", [{"file": "../step-00000002/shard-00000.safetensors"}, {"file": "/etc/hostname"}, {"dtype": "load"}]
)
def test_a_manifest_that_lies_with_a_right_sum_is_refused(change: dict[str, str], tmp_path: Path) -> None:
    path = saved(tmp_path, 1) / "step-00000001" / MANIFEST
    body = read_manifest(path.parent)
    tensor = body["tensors"]["model.w"]
    (tensor["pieces"][0] if "file" in change else tensor).update(change)
    path.write_bytes(storage.sealed(storage.encode(body)))
    assert "has an impossible entry for 'model.w'" in damage(path.parent)
    if "file" in change:
        body["files"][change["file"]] = {"bytes": 1, "sha256": ""}
        path.write_bytes(storage.sealed(storage.encode(body)))
        assert "which a save does not write" in damage(path.parent)


# ---- another run's checkpoint


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Weights(w=torch.zeros(4, 3), b=torch.zeros(2).bfloat16()), r"'model.w' is \[4, 3\] torch.float32 in this run"),
        (Weights(w=torch.zeros(3, 4), b=torch.zeros(2)), "'model.b' is .*float32 in this run and .*bfloat16 in the ch"),
        (Weights(w=torch.zeros(3, 4), b=torch.zeros(2).bfloat16(), c=torch.zeros(1)), "no such tensor in the checkpoint"),
        (Weights(w=torch.zeros(3, 4)), "has 1 tensors that this run's model has not, 'model.b' first"),
    ],
)  # fmt: skip
def test_another_model_is_refused_before_anything_changes(model: nn.Module, message: str, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Checkpoints(saved(tmp_path, 1)) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.load(TrainState(model, []))
    assert all(equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_other_parts_and_other_settings_are_said(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, settings=lambda step: {"steps": 1}) as checkpoints:
        checkpoints.save(1, small(1, old=1, both=2))
    state = small(0, both=0, new=5)
    with Checkpoints(tmp_path, settings=lambda step: {"steps": 2}) as checkpoints, pytest.warns(UserWarning) as said:
        checkpoints.load(state)
    text = " ".join(str(warning.message) for warning in said)
    assert "no 'part.new'" in text and "'part.old', which this run has no use for" in text
    assert "steps was 1 and is 2" in text
    assert state.parts["both"].value == 2 and state.parts["new"].value == 5


# ---- kill -9


def train(folder: Path, report: Connection) -> None:
    """Saves without pause, and says which steps are on the disk for certain."""
    os.environ["OMP_NUM_THREADS"] = "1"
    state = small()
    with Checkpoints(folder, keep=2) as checkpoints:
        step = checkpoints.load(state)
        report.send((step, step == 0 or same(state, step)))
        checkpoints.save(step, small(step)) if step else None  # once more, as a run that went back would
        while True:
            step += 1
            checkpoints.save(step, small(step))
            checkpoints.wait()
            report.send((step, True))


def test_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    choose, certain, in_flight, duration = random.Random(), 0, 0, 0.05
    for turn in range(20):
        ours, theirs = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=train, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        resumed, whole = ours.recv()
        assert whole and certain <= resumed <= certain + 1
        if turn % 2 == 0:  # every other time, one save is let through
            started = time.monotonic()
            certain = ours.recv()[0]
            duration = time.monotonic() - started
        time.sleep(choose.random() * 2 * duration)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        certain = max(certain, resumed)
        try:
            while True:
                certain = max(certain, ours.recv()[0])
        except EOFError:
            pass
        in_flight += any(name.endswith(".partial") for name in (names(tmp_path) if tmp_path.exists() else []))
        if certain:
            state = loaded(tmp_path)
            assert certain <= state.step <= certain + 1 and same(state, state.step)
    assert certain >= 9 and in_flight > 0  # some of the kills did meet a save half done


# ---- signals


def test_a_signal_is_a_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()
    assert signal.getsignal(signal.SIGTERM) is before


def hang(ready: Connection) -> None:
    with Stop():
        ready.send(None)
        while True:
            time.sleep(0.01)


def test_a_second_signal_ends_at_once() -> None:
    ours, theirs = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=hang, args=(theirs,))
    process.start()
    ours.recv()
    os.kill(process.pid, signal.SIGINT)
    process.join(0.3)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == 128 + signal.SIGTERM


# ---- many ranks


def full(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"rows": torch.randn(5, 3, generator=generator), "all": torch.randn(2, 2, generator=generator)}


def sharded(step: int, dim: int) -> TrainState:
    """5 rows on 2 ranks: 3 and 2. Moments are sharded like their parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": [Shard(dim)], "all": [Replicate()]}
    tensors = {name: distribute_tensor(t, mesh, placements[name]) for name, t in full(step).items()}
    model = Weights(**tensors, plain=torch.full((2,), float(step)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainState(model, [optimizer], step, {"box": Box(tensors["rows"] * 2)})
    model.rows.grad = distribute_tensor(full(step)["rows"], mesh, placements["rows"])
    optimizer.step()  # which makes the moments
    if step:
        torch.manual_seed(100 * step + dist.get_rank())
    return state


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def summary(state: TrainState) -> dict[str, Any]:
    moments = state.optimizers[0].state[state.model.rows]
    values = {
        "rows": state.model.rows,
        "all": state.model.all,
        "plain": state.model.plain,
        "box": state.parts["box"].value,
    }
    return {name: whole(value).detach().clone() for name, value in {**values, **moments}.items()}


def save_two(rank: int, world: int, folder: Path) -> Any:
    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(1, sharded(1, 0))
        state = sharded(2, 0)
        checkpoints.save(2, state)
        checkpoints.wait()
        asked: list[int] = []
        storage.check_free = lambda folder, size, count: asked.append(size)  # type: ignore[assignment]
        checkpoints.check_room(state, 1)
    tensors = read_manifest(folder / "run" / "step-00000002")["tensors"].values()
    assert asked == [sum(int(np.prod(t["shape"])) * getattr(torch, t["dtype"]).itemsize for t in tensors)]
    draw = torch.rand(3).tolist()
    return {name: value.tolist() for name, value in summary(state).items()}, draw


def load_rows(rank: int, world: int, folder: Path) -> Any:
    state = sharded(0, 0)
    with Checkpoints(folder / "run") as checkpoints:
        assert checkpoints.load(state) == 2
    return {name: value.tolist() for name, value in summary(state).items()}, torch.rand(3).tolist()


def load_columns(rank: int, world: int, folder: Path) -> Any:
    state = sharded(0, 1)
    with Checkpoints(folder / "run") as checkpoints, warnings.catch_warnings(record=True) as said:
        assert checkpoints.load(state) == 2
    local_shapes = [
        list(t.to_local().shape) for t in (state.model.rows, state.optimizers[0].state[state.model.rows]["exp_avg"])
    ]
    return (
        {name: value.tolist() for name, value in summary(state).items()},
        local_shapes,
        [str(w.message) for w in said],
    )


def fail_on_one(rank: int, world: int, folder: Path) -> Any:
    if rank == 1:
        disk.write_all = no_space
    try:
        with Checkpoints(folder / "run") as checkpoints:
            checkpoints.save(3, sharded(3, 0))
    except ValueError as error:
        return str(error)
    return None


def load_past_damage(rank: int, world: int, folder: Path) -> Any:
    state = sharded(0, 0)
    with Checkpoints(folder / "run") as checkpoints, warnings.catch_warnings(record=True) as said:
        return checkpoints.load(state), [str(w.message) for w in said]


def stop_on_one(rank: int, world: int, folder: Path) -> Any:
    group = dist.new_group(backend="gloo")
    with Stop() as stop:
        before = stop.requested(group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before, stop.requested(), stop.requested(group)


def test_two_ranks_save_and_other_meshes_load(tmp_path: Path) -> None:
    (wrote, draw_0), (same_wrote, draw_1) = ranks.run(2, save_two, tmp_path)
    assert wrote == same_wrote and draw_0 != draw_1
    run = tmp_path / "run"
    assert names(run / "step-00000002") == [MANIFEST, "shard-00000.safetensors", "shard-00001.safetensors"]
    pieces = read_manifest(run / "step-00000002")["tensors"]["model.rows"]["pieces"]
    assert sorted((p["offset"], p["shape"]) for p in pieces) == [([0, 0], [3, 3]), ([3, 0], [2, 3])]

    (back_0, again_0), (back_1, again_1) = ranks.run(2, load_rows, tmp_path)
    assert back_0 == back_1 == wrote and (again_0, again_1) == (draw_0, draw_1)  # each rank's own generator

    answers = ranks.run(3, load_columns, tmp_path)
    assert all(values == wrote and shapes == [[5, 1], [5, 1]] for values, shapes, _ in answers)
    assert [len(said) for *_, said in answers] == [0, 0, 1] and "no 'rank.2.rng'" in answers[2][2][0]  # rank 2 is new

    alone = small()
    model = Weights(**full(0), plain=torch.zeros(2))
    alone = TrainState(model, [torch.optim.AdamW(model.parameters())], parts={"box": Box()})
    with Checkpoints(run) as checkpoints:
        assert checkpoints.load(alone) == 2
    assert {name: value.tolist() for name, value in summary(alone).items()} == wrote

    reasons = ranks.run(2, fail_on_one, tmp_path)
    assert reasons[0] == reasons[1] and "rank 1 could not save" in reasons[0] and "No space" in reasons[0]
    assert names(run) == ["step-00000001", "step-00000002"]

    flip(run / "step-00000002" / "shard-00001.safetensors")
    (step_0, said_0), (step_1, said_1) = ranks.run(2, load_past_damage, tmp_path)
    assert step_0 == step_1 == 1 and "shard-00001" in said_0[0] and said_1 == []  # said once


def test_one_rank_asked_to_stop_is_all_asked(tmp_path: Path) -> None:
    assert ranks.run(2, stop_on_one, tmp_path) == [(False, False, True), (False, True, True)]
