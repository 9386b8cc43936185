"""Islands around the loop: what they learn is what runs learn, and a stop of either side changes no bit of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.islands import SECRET
from tests.unit.training.test_copies import masters, pulled, used
from tests.unit.training.test_train import WORDS, Stopped, config, losses, moe, place, stops_before
from training.__main__ import main
from training.checkpoint.state import found
from training.config.schema import TrainConfig
from training.islands import island as island_module
from training.islands import run as run_module
from training.islands.center import Center
from training.islands.config import IslandsConfig
from training.islands.island import Island
from training.islands.link import frames, wire
from training.islands.link.frames import Channel, Cut, Frame
from training.islands.link.server import Server
from training.islands.rules import dgs
from training.islands.sparse import Sparse
from training.observe.metrics import read as read_metrics
from training.run import step as step_module
from training.run import stop
from training.run.loop import train
from upcycle.io import disk, publish

__all__ = ["place"]  # a fixture


@contextmanager
def server(given: TrainConfig) -> Iterator[Server]:
    """A server of a config in a thread, until it ends by itself or the context does."""
    here: list[Server] = []
    came, stop = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def ready(found: Server) -> Any:
        here.append(found)
        came.set()
        return stop.is_set

    def work() -> None:
        try:
            run_module.serve(given, ready)
        except BaseException as error:
            failed.append(error)
            came.set()

    thread = threading.Thread(target=work, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Stop", Quiet)  # signals are the main thread's
        thread.start()
        assert came.wait(60) and not failed, failed
    try:
        yield here[0]
    finally:
        stop.set()
        thread.join(30)
    assert not failed, failed


class Quiet:
    signal = None

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def words(tmp_path: Path, *more: str) -> list[str]:
    secret = tmp_path / "secret"
    tmp_path.mkdir(exist_ok=True)
    secret.write_bytes(SECRET)
    return [f"islands.secret={secret}", "islands.patience=1", "device=cpu", *more]


def served(place: Path, tmp_path: Path, *more: str, steps: int = 8) -> TrainConfig:
    return config(place, tmp_path / "server", *words(tmp_path, "islands.listen=127.0.0.1:0", *more), steps=steps)


def joined(place: Path, tmp_path: Path, name: str, port: int, *more: str, steps: int = 8) -> TrainConfig:
    return config(place, tmp_path / name, *words(tmp_path, f"islands.join=127.0.0.1:{port}", *more), steps=steps)


EVERYTHING = ["islands.every=1", "islands.share=1", "optim.weight_decay=1", "balance.bias_rate=0", "schedule.peak=2e-3"]


def test_one_island_that_sends_everything_each_step_is_the_plain_run(place: Path, tmp_path: Path) -> None:
    """What bfloat16 rounds of a push stays with the island, and the decay that is not in the push is in the scale: so only
    float32's sums differ, and (rate * decay) ** 2."""
    plain = train(config(place, tmp_path / "plain", *EVERYTHING, steps=6))
    with server(served(place, tmp_path, *EVERYTHING)) as here:
        run = train(joined(place, tmp_path, "one", here.port, *EVERYTHING, steps=6))
        assert here.center.steps == 6 and here.center.pushes == 6
    for (_, *a), (_, *b) in zip(losses(plain), losses(run), strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None and y is None) or math.isclose(x, y, rel_tol=2e-4), (x, y)


def test_an_island_learns_at_its_own_pace_what_it_has_not_sent(place: Path, tmp_path: Path) -> None:
    """Of four islands each one's delta counts a quarter, for the others: it goes on itself with all that it has learned,
    or every exchange would throw three quarters of it away."""
    whole = "optim.groups=[{match: '*norm', lr: 0}, {match: router, lr: 0}]"  # what is sent whole would count a quarter
    more = ["islands.every=1", "balance.bias_rate=0", "schedule.peak=2e-3", "optim.weight_decay=0", whole]
    plain = train(config(place, tmp_path / "plain", *more, steps=8))
    few = [*more, "islands.share=1e-9", "islands.gain=0.25"]  # one number of a matrix
    with server(served(place, tmp_path, *few)) as here:
        run = train(joined(place, tmp_path, "one", here.port, *few, steps=8))
    pairs = [(a[1], b[1]) for a, b in zip(losses(plain), losses(run), strict=True) if a[1] is not None]
    assert len(pairs) >= 7 and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs), pairs


def test_a_run_and_its_server_stopped_anywhere_are_bitwise_the_run_that_never_stopped(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges every 2 steps, checkpoints every 3: at step 3 half an interval is under way, and what was exchanged
    at step 4 is exchanged again."""
    more = ["islands.every=2", "islands.share=0.1"]
    with server(served(place, tmp_path / "a", *more)) as here:
        whole = train(joined(place, tmp_path / "a", "one", here.port, *more))
        model = here.center.rule.model
    with server(served(place, tmp_path / "b", *more)) as here, monkeypatch.context() as patch:
        patch.setattr(step_module, "train_step", stops_before(6))
        with pytest.raises(Stopped):
            train(joined(place, tmp_path / "b", "one", here.port, *more))
    (folder,) = found(tmp_path / "b" / "one" / "checkpoints")
    assert folder.name == "step-00000003"
    with server(served(place, tmp_path / "b", *more)) as here:  # from its snapshot
        assert here.center.members["one"].seq == 2
        again = train(joined(place, tmp_path / "b", "one", here.port, *more))
        assert here.center.pushes == 4
        assert torch.equal(here.center.rule.model, model)
    assert losses(again) == losses(whole)


@pytest.mark.parametrize(("how", "step"), [("signal", 4), ("patience", 8)])
def test_an_exchange_without_an_answer_is_saved_and_finished_by_the_next_process(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, step: int
) -> None:
    """Lose the answer to a push that counts: the next process sends the same push and is told the same."""
    more = ["islands.every=2", "islands.share=0.1"]
    with server(served(place, tmp_path / "a", *more)) as here:
        whole = train(joined(place, tmp_path / "a", "one", here.port, *more))
        model = here.center.rule.model
    real = Server.answer

    def lost(self: Server, channel: Channel, name: str, frame: Frame) -> None:
        if frame.kind == frames.PUSH and frame.seq == step // 2:
            with self.changed:
                self.told(channel, name, frame)
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            raise Cut("the answer is lost")
        real(self, channel, name, frame)

    with server(served(place, tmp_path / "b", *more)) as here:
        with monkeypatch.context() as patch:
            patch.setattr(Server, "answer", lost)
            short = joined(place, tmp_path / "b", "one", here.port, *more, "islands.patience=0.01")
            if how == "signal":
                short = joined(place, tmp_path / "b", "one", here.port, *more)
            with pytest.raises((stop.Stopped, ValueError), match=f"step {step}"):
                train(short)
        assert found(tmp_path / "b" / "one" / "checkpoints")[0].name == f"step-0000000{step}"
        again = train(joined(place, tmp_path / "b", "one", here.port, *more))
        assert here.center.pushes == 4 and not here.center.members["one"].here
        assert torch.equal(here.center.rule.model, model)
    assert losses(again) == losses(whole)


def test_a_signal_in_an_exchange_saves_and_ends_with_the_code_of_a_stopped_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has the push and does not answer: the island must not wait for its patience, a minute."""
    more = ["islands.every=2", "islands.share=0.1"]
    given = [f"model.upcycle={json.dumps(moe(place))}", "steps=4", f"data.train=[{place / 'data'}]", *WORDS]
    real, silent = Server.answer, threading.Event()

    def slow(self: Server, channel: Channel, name: str, frame: Frame) -> None:
        if frame.kind == frames.PUSH and frame.seq == 1 and not silent.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            silent.wait()
            return
        real(self, channel, name, frame)

    monkeypatch.setattr(Server, "answer", slow)
    with server(served(place, tmp_path, *more, steps=4)) as here:
        island = words(tmp_path, f"islands.join=127.0.0.1:{here.port}", "valid_every=0", *more)
        command = [f"output={tmp_path / 'one'}", *given, *island]
        assert main(command) == 75
        silent.set()
        assert "stopped after step 2 of 4; the same command continues" in capsys.readouterr().out
        assert found(tmp_path / "one" / "checkpoints")[0].name == "step-00000002"
        assert main(command) == 0
        assert here.center.pushes == 2 and not here.center.members["one"].here


def test_islands_learn_from_each_other_and_the_export_is_the_servers_model(place: Path, tmp_path: Path) -> None:
    more = ["islands.every=2", "islands.share=0.1", "islands.answer=0.2"]
    export = tmp_path / "model"
    with server(served(place, tmp_path, *more, f"export={export}", "islands.count=2")) as here:
        a = joined(place, tmp_path, "a", here.port, *more, steps=4)
        first = train(a)
        train(joined(place, tmp_path, "b", here.port, *more, steps=4))  # late: it takes the whole model
        numbers = here.center.layout.size
    assert (export / "model.safetensors").exists()
    rows = read_metrics(first)
    row = next(row for row in rows if "islands/sent" in row)
    assert row["islands/islands"] == 1 and 0.05 < row["islands/sent"] < 0.2 and row["islands/unsent"] > 0
    assert 0 < row["islands/bytes_up"] < 4 * numbers
    late = read_metrics(tmp_path / "b")
    assert late[0]["valid/valid/loss"] < rows[0]["valid/valid/loss"]


@pytest.mark.parametrize("old", [False, True])
def test_a_server_exports_its_islands_copies_pulled_together_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """An older island pulled its copies before its last push, and did not say that an export should."""
    if old:
        head_of = Center.head_of

        def unsaid(*given: Any) -> Any:
            head, rest = head_of(*given)
            return {key: value for key, value in head.items() if key != "masters"}, rest

        monkeypatch.setattr(Center, "head_of", unsaid)
    more = [*EVERYTHING, "schedule.warmup=0", "model.upcycle.target=upcycled", "model.upcycle.router.choice=each-slice"]
    out = tmp_path / "model"
    with server(served(place, tmp_path, *more, f"export={out}", "islands.count=1", steps=2)) as here:
        run = train(joined(place, tmp_path, "one", here.port, *more, steps=2))
    have, held = used(out), masters(run, 2)
    for name, each in held.items():
        want = each if old else pulled(each, 2, 0.3)
        torch.testing.assert_close(have[name], want, rtol=1e-6, atol=1e-6)
        assert float((pulled(each, 2, 0.3) - each).abs().max()) > 1e-4


def test_local_islands_begun_again_after_their_end_say_so_and_write_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run does. What ended between the last island's leave and its export is exported by the same command."""
    run, export = tmp_path / "try", tmp_path / "model"
    given = [
        f"output={run}", f"export={export}", f"model.upcycle={json.dumps(moe(place))}", f"data.train=[{place / 'data'}]",
        *WORDS, "schedule.warmup=0", "islands.local=2", "islands.every=1", "device=cpu", "valid_every=0",
        "checkpoint.every=1",
    ]  # fmt: skip

    def local(steps: int = 2) -> tuple[int, str, str]:
        return main([*given, f"steps={steps}"]), *capsys.readouterr()

    def files() -> dict[Path, tuple[int, bytes]]:
        every = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != publish.LOCK]
        return {path: (path.stat().st_ino, path.read_bytes()) for path in every}

    code, out, err = local()
    said = out.splitlines(keepends=True)[-1]
    assert code == 0 and f"{run} is trained: " in said and f" 2 islands; {export} is the model" in said, (out, err)
    before = files()
    assert local() == (0, said, "") and files() == before
    export.rename(tmp_path / "kept")
    assert local()[0] == 0
    assert (export / "model.safetensors").read_bytes() == (tmp_path / "kept" / "model.safetensors").read_bytes()
    code, out, err = local(steps=3)
    assert code == 2 and "steps=3, and the islands in" in err and "left for good after 2; for more steps" in err
    last = run / "island-0" / "checkpoints" / "step-00000002"
    last.rename(last.with_name(f"{last.name}.partial"))  # killed after its leave, in its save
    assert local() == (0, said, "") and not list(run.rglob("*.partial"))
    shutil.rmtree(run)
    code, out, err = local()
    assert code == 2 and f"export={export} exists already; remove it" in err


def test_half_a_secret_is_none(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop in the middle of its write: the next start must not read half of it."""
    given = config(place, tmp_path / "try", "islands.local=2", "device=cpu")

    def half(file: int, data: memoryview) -> None:
        os.write(file, data[:8])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(disk, "write_all", half)
        patch.setattr(publish, "sign", lambda *_: None)
        run_module.local(given, [])
    assert not list(tmp_path.rglob("secret*"))

    def served(*_: object, **__: object) -> None:
        raise Stopped

    (tmp_path / "try" / "islands").mkdir(parents=True)  # as a server leaves it that fails before its log
    monkeypatch.setattr(run_module, "serve", served)
    with pytest.raises(Stopped):
        run_module.local(given, [])
    assert len(frames.secret_of(str(tmp_path / "try" / "secret"))) == 64
    assert (tmp_path / "try" / "secret").stat().st_mode & 0o777 == 0o600


LOCAL = """
import sys
from pathlib import Path
from tests.unit.training.test_train import config
from training.islands import run

CHILD = "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN)" \\
    "; from pathlib import Path; from upcycle.io import publish; folder = Path(sys.argv[1]).with_suffix('')" \\
    "; publish.alone(folder / publish.LOCK, folder).__enter__()" \\
    "; open(sys.argv[1] + '.new', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '.new', sys.argv[1])" \\
    "; time.sleep(float(os.environ.get('ORPHAN', '600'))); open(sys.argv[1] + '.orphan', 'w')"

def again(*words):
    out = next(word for word in words if word.startswith("output=")).removeprefix("output=")
    return [sys.executable, "-c", CHILD, out + ".pid"]

run.again = again
place, out = sys.argv[1:]
run.local(config(Path(place), Path(out), "islands.local=2", "islands.patience=0.02", "device=cpu", steps=8), [])
"""


def test_local_islands_end_with_their_server(place: Path, tmp_path: Path) -> None:
    """End even islands that ignore SIGTERM, and free their locks. An island that nobody ends leaves a mark."""

    def alive(pid: str) -> bool:
        stat = Path("/proc", pid, "stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    parents = {
        number: subprocess.Popen([sys.executable, "-c", LOCAL, str(place), str(tmp_path / number.name)])
        for number in (signal.SIGTERM, signal.SIGKILL)
    }
    files = [tmp_path / number.name / f"island-{k}.pid" for number in parents for k in range(2)]
    while not all(file.exists() for file in files):
        assert all(parent.poll() is None for parent in parents.values())
        time.sleep(0.1)
    for number, parent in parents.items():
        parent.send_signal(number)
        parent.wait()
    while any(alive(file.read_text()) for file in files):
        time.sleep(0.1)
    assert not list(tmp_path.rglob("*.orphan"))
    for folder in (file.with_suffix("") for file in files):
        with publish.alone(folder / publish.LOCK, folder):
            pass


def test_an_exchange_is_in_parts_and_they_are_the_whole(place: Path, tmp_path: Path) -> None:
    """Numbers are many bytes each while they are numbers, so few of them are at a time, on both sides; it is the same
    exchange to the bit."""
    more = ["islands.every=2", "islands.share=0.1"]
    with server(served(place, tmp_path / "a", *more)) as here:
        at_once = losses(train(joined(place, tmp_path / "a", "one", here.port, *more, steps=4)))
        model, size = here.center.rule.model, here.center.layout.size
        largest = max(p.size for p in here.center.layout.places.values())
    seen: list[int] = []

    def told(sparse: Sparse, chunks: int) -> tuple[bytes, ...]:
        seen.append(len(sparse.index))
        return sections(sparse, chunks)

    def read(*given: Any) -> Sparse:
        found = piece(*given)
        seen.append(len(found.index))
        return found

    sections, piece = wire.sections, wire.piece
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(island_module, "NUMBERS", 1000)
        patch.setattr(dgs, "PART", 2 * wire.CHUNK)
        patch.setattr(wire, "PIECE", 2)
        patch.setattr(wire, "sections", told)
        patch.setattr(wire, "piece", read)
        with server(served(place, tmp_path / "b", *more)) as here:
            in_parts = losses(train(joined(place, tmp_path / "b", "one", here.port, *more, steps=4)))
            assert torch.equal(here.center.rule.model, model)
    assert in_parts == at_once
    assert sum(seen) > size and max(seen) <= largest + wire.CHUNK < size // 4


def test_what_does_not_go_with_islands_is_said(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optim.average=0.5 does not go with islands.join"):
        joined(place, tmp_path, "a", 1, "optim.average=0.5")
    with (
        server(served(place, tmp_path, "schedule.peak=1e-3")) as here,
        pytest.raises(ValueError, match=r"island a has schedule.peak=0.002, and the server has 0.001; start both"),
    ):
        train(joined(place, tmp_path, "a", here.port, "schedule.peak=2e-3"))
    with pytest.raises(ValueError, match="set it back, or choose another output"):
        run_module.serve(served(place, tmp_path, "islands.rule=dense"))


def test_experts_send_by_their_tokens_and_who_waits_too_long_sends_all() -> None:
    island: Any = SimpleNamespace(config=IslandsConfig(share=0.1, age=2), ages=torch.zeros(1, 4, dtype=torch.int64))
    loads = torch.tensor([[60, 60, 20, 0]])
    for number in range(1, 7):
        shares = Island.shares(island, loads)[0].tolist()
        assert shares[0] == shares[1] == pytest.approx(0.1 * (60 / 35) / ((60 + 60 + 20 + 3.5) / 4 / 35))
        assert (shares[3] == 1.0) == (number % 3 == 0), number  # not a token, and not forgotten
        assert shares[2] < 0.1  # few, and more than half of the mean: it does not age
    assert Island.shares(island, torch.zeros(1, 4, dtype=torch.int64))[0, :3].tolist() == pytest.approx([0.1] * 3)
