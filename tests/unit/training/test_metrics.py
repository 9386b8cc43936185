"""The log says what happened, once, also after a resume; nothing waits for the device in between; plots are drawn."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evaluation.cli.report import main
from training.observe import metrics, plots, profiling
from training.observe.metrics import BEFORE, DAMAGED, FILE, Line, Metrics, describe, duration, read
from training.observe.profiling import Phases, Trace, memory_snapshot, steps_to_trace

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loss(step: int) -> Tensor:
    return torch.tensor(4 * math.exp(-step / 50))


def run(folder: Path, first: int, last: int, every: int = 5, **options: Any) -> str:
    """A run of steps first + 1 ... last; each has 100 tokens."""
    out = io.StringIO()
    with Metrics(folder, first, steps=100, stream=out, **options) as log:
        if first == 0:
            log.log(0, **{"valid/web/loss": 4.0})
        for step in range(first + 1, last + 1):
            log.step(step, tokens=100, loss=loss(step), lr=step / 1000)
            if step % every == 0:
                log.log(step, **{"balance/0/max_over_mean": 1.5, "balance/max_over_mean": 1.5})
            if step % 10 == 0:
                log.log(step, **{"valid/web/loss": 3.0 - step / 100})
    return out.getvalue()


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the clock says."""
    timed = {"seconds_per_step", "tokens_per_s", "tflops", "mfu", "eta_s", "memory_gb"}
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


# ---- what is written


def test_a_row_has_means_of_the_interval_and_the_latest_of_the_rest(tmp_path: Path) -> None:
    live = torch.tensor(0)  # an int tensor that its owner counts up in place
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        for step, value in enumerate([1.0, 2.0, 6.0], 1):
            live.add_(1)
            log.step(step, tokens=10, loss=torch.tensor(value), skipped=live, lr=value)
        log.log(3, extra=7.5)
        log.step(4, tokens=10, loss=torch.tensor(5.0), skipped=live, lr=0.5)
        log.log(4)
    first, second = read(tmp_path)
    assert (first["loss"], first["skipped"], first["lr"], first["extra"], first["tokens"]) == (3.0, 3, 6.0, 7.5, 30)
    assert (second["loss"], second["tokens"]) == (5.0, 40) and "extra" not in second


def test_a_tensor_changed_in_place_after_the_step_counts_as_it_was(tmp_path: Path) -> None:
    buffer = torch.zeros(())
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        for step in (1, 2, 3):
            buffer.fill_(step)
            log.step(step, tokens=1, loss=buffer)
        buffer.fill_(100)
        log.log(3)
    assert read(tmp_path)[0]["loss"] == 2.0


def test_a_step_that_was_not_finite_does_not_spoil_the_mean(tmp_path: Path) -> None:
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        for step, value in enumerate([1.0, math.nan, math.inf, 2.0], 1):
            log.step(step, tokens=1, loss=torch.tensor(value))
        log.log(4)
        log.step(5, tokens=1, loss=torch.tensor(math.nan))
        log.log(5)
    text = (tmp_path / FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text  # no JSON
    assert [row["loss"] for row in read(tmp_path)] == [1.5, None]


def test_nothing_is_read_from_the_device_before_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, o=original, n=name: (reads.append(n), o(self, *a))[1])
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        for step in range(1, 50):
            log.step(step, tokens=1, loss=loss(step), grad_norm=loss(step), skipped=torch.tensor(0))
        assert reads == []
        log.log(49, more=torch.tensor(1.0))
    assert reads == ["tolist"]  # one, for all


def test_a_value_that_is_no_scalar_is_an_error(tmp_path: Path) -> None:
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        log.step(1, tokens=1, loss=torch.zeros(2))
        with pytest.raises(RuntimeError, match="shape"):
            log.log(1)


def test_speed_counts_training_time_only(tmp_path: Path) -> None:
    flops = 2e6
    with Metrics(tmp_path, steps=10, flops=flops, gpus=2, stream=io.StringIO()) as log:
        time.sleep(0.02)
        log.step(1, tokens=1000, loss=loss(1))
        log.log(1)
        time.sleep(0.5)  # validation
        log.log(1, **{"valid/web/loss": 1.0})
        time.sleep(0.02)
        log.step(2, tokens=1000, loss=loss(2))
        log.log(2)
    for row in read(tmp_path):
        assert 0.02 <= row["seconds_per_step"] < 0.3
        assert row["tokens_per_s"] * row["seconds_per_step"] == pytest.approx(1000)
        assert row["tflops"] == pytest.approx(flops * row["tokens_per_s"] / 2 / 1e12)
        assert row["flops"] == flops * row["tokens"]
        assert 0.01 < row["memory_gb"] < 100 and row["eta_s"] >= 8 * 0.02
        assert torch.cuda.is_available() or "mfu" not in row  # of a CPU there is no peak to divide by


# ---- resume


@given(st.data())
def test_a_killed_and_resumed_log_is_that_of_a_run_that_never_stopped(data: st.DataObject) -> None:
    """Killed after any step, resumed from any multiple of 10 at or before it, possibly in the middle of a line."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        whole, folder = Path(name) / "whole", Path(name) / "killed"
        run(whole, 0, 40)
        run(folder, 0, killed := data.draw(st.integers(1, 40)))
        first = 10 * data.draw(st.integers(0, killed // 10))
        if torn := data.draw(st.integers(0, 3)):
            with open(folder / FILE, "a") as file:
                file.write('{"step": 41, "loss": 1.25}\n'[: torn * 7])
        run(folder, first, 40)
        assert steady(metrics.parse(folder / FILE)) == steady(metrics.parse(whole / FILE))
        steps = [row["step"] for row in metrics.parse(folder / FILE) if "loss" in row]
        assert steps == [5, 10, 15, 20, 25, 30, 35, 40]


def test_a_run_that_starts_anew_keeps_the_old_file_beside_its_own(tmp_path: Path) -> None:
    run(tmp_path, 0, 10)
    old = (tmp_path / FILE).read_text()
    run(tmp_path, 0, 5)
    assert (tmp_path / BEFORE).read_text() == old and [row["step"] for row in read(tmp_path)] == [0, 5]


def test_tokens_go_on_when_the_checkpoint_is_not_at_a_line(tmp_path: Path) -> None:
    run(tmp_path, 0, 8)
    run(tmp_path, 8, 20)
    assert [row.get("tokens") for row in read(tmp_path)] == [None, 500, 1000, 1500, 2000]


def test_nothing_to_say_is_no_line(tmp_path: Path) -> None:
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        log.log(0)
        log.log(0, other=1.0)
    assert metrics.parse(tmp_path / FILE) == [{"step": 0, "other": 1.0}]


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert run(tmp_path / "one", 0, 10) == "" and not (tmp_path / "one").exists()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert run(tmp_path / "zero", 0, 10) and (tmp_path / "zero" / FILE).exists()


def test_reading_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; give the folder of a run"):
        read(tmp_path)


# ---- the live line


def test_every_flipped_bit_of_a_log_is_named_and_the_other_lines_stay(tmp_path: Path) -> None:
    run(tmp_path, 0, 20)
    path, whole = tmp_path / FILE, (tmp_path / FILE).read_bytes()
    rows = metrics.parse(path)
    for at in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            left = metrics.parse(path)
        if left != rows:
            assert all(row in rows for row in left) and len(left) >= len(rows) - 2
            assert re.search(rf"{FILE}: lines? [\d, ]+ (is|are) damaged and left out", str(said[0].message))
        else:  # the line end of the last line
            assert at // 8 >= len(whole) - 1


def test_a_resume_keeps_the_rows_behind_a_damaged_line_and_the_damaged_file(tmp_path: Path) -> None:
    run(tmp_path, 0, 40)
    path = tmp_path / FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(damaged := "".join([*lines[:2], lines[2].replace(": 1", ": 2", 1), *lines[3:]]))
    with pytest.warns(UserWarning, match=f"{FILE}: line 3 is damaged and left out.*its checksum differs"):
        run(tmp_path, 30, 40)
    steps = [row["step"] for row in metrics.parse(path) if "loss" in row]
    assert steps == [5, 15, 20, 25, 30, 35, 40] and (tmp_path / DAMAGED).read_text() == damaged


def test_a_log_of_an_older_version_is_read_and_gets_checksums_at_a_resume(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text('{"step": 5, "loss": 2.5}\n{"step": 7, "lo\n{"step": 10, "loss": 2.0}\n')
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        run(tmp_path, 10, 20)
    assert [row["step"] for row in read(path) if "loss" in row] == [5, 10, 15, 20]
    path.write_text(path.read_text().replace("2.5", "3.5", 1))
    with pytest.warns(UserWarning, match="line 1 is damaged"):
        assert [row["step"] for row in read(path) if "loss" in row] == [10, 15, 20]


def test_a_line_that_holds_no_numbers_is_one_sentence_and_a_torn_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "lr": null}\n{"step": 2, "lo')
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert [row["loss"] for row in read(path)] == [2.5]
    for odd in ('"x"', "[1]", "true", "{}"):
        path.write_text(f'{{"step": 1, "loss": {odd}}}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl:1 has loss=.*must be a number"):
            read(path)


def test_a_log_file_gets_a_line_an_interval(tmp_path: Path) -> None:
    lines = run(tmp_path, 0, 10, flops=1e6).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0", "step 5/100", "step 10/100", "step 10"]
    for word in ("loss 3.", "tok/s", "TFLOP/s", "GB", "load 1.50", "lr 1.00e-02", "ETA 0:0"):
        assert word in lines[2], word
    assert lines[3] == "step 10  valid  web/loss 2.9000"


def test_a_terminal_gets_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    line = Line(out)
    line.show("first"), line.show("x" * 50), line.keep("validation"), line.show("last"), line.end()
    assert out.getvalue() == f"\r\x1b[Kfirst\r\x1b[K{'x' * 19}\nvalidation\n\r\x1b[Klast\n"


def test_numbers_as_a_person_reads_them() -> None:
    row = {"step": 7, "loss": 2.5, "tokens_per_s": 12345.6, "mfu": 0.456, "eta_s": 3725, "grad_norm": 0.5, "skipped": 2}
    assert describe(row, 10) == "step 7/10  loss 2.5000  12,346 tok/s  MFU 45.6%  grad 0.5  ETA 1:02:05  skipped 2"
    assert (
        describe({"step": 7, "balance/whole": 0.9841, "balance/max_over_mean": 2}, 0)
        == "step 7  load 2.00  whole 98.4%"
    )
    assert describe({"step": 7, "loss": math.nan, "skipped": 0}, 0) == "step 7  loss nan"
    assert [duration(s) for s in (0, 59.6, 90061)] == ["0:00:00", "0:01:00", "25:01:01"]


# ---- profiling


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.25, 1.0, 1.5, 10.0, 10.25, 20.0, 20.5])  # where each phase begins and ends
    monkeypatch.setattr("training.observe.profiling.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases("forward"):
            pass
        with phases("backward"):
            pass
    assert phases.fetch(steps=2) == {"time/forward": 0.25, "time/backward": 0.5}
    assert phases.fetch() == {}


@pytest.mark.gpu
@NEEDS_CUDA
def test_phases_take_the_devices_time() -> None:
    phases, x = Phases(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    started = time.perf_counter()
    with phases("work"):
        for _ in range(50):
            x @ x
    queued = time.perf_counter() - started
    assert phases.fetch()["time/work"] > queued  # the processor was done before the device


@pytest.mark.parametrize(("steps", "traced"), [("2-3", [2, 3]), ("2", [2]), ("5", [5]), ("9", []), ("", [])])
def test_a_trace_has_the_steps_asked_for(steps: str, traced: list[int], tmp_path: Path) -> None:
    phases = Phases(torch.device("cpu"))
    with Trace(tmp_path, steps_to_trace(steps)) as trace:
        for step in range(1, 6):
            trace.before(step)
            with phases(f"step {step}"):
                torch.ones(3) @ torch.ones(3)
    files = list(tmp_path.iterdir())
    assert [file.name for file in files] == ([f"trace-{traced[0]}-{traced[-1]}.json.gz"] if traced else [])
    if traced:
        with gzip.open(files[0]) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {f"step {step}" for step in range(1, 6)} & names == {f"step {step}" for step in traced}
        assert "aten::dot" in names


@pytest.mark.parametrize("steps", [" ", "3-2", "0", "a-b", "1-2-3", "-1"])
def test_a_bad_range_is_one_sentence(steps: str) -> None:
    with pytest.raises(ValueError, match=r"profile is .*; write the steps to trace, such as 10-12"):
        steps_to_trace(steps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_memory_snapshot_without_cuda_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="memory_snapshot=true needs a CUDA device"),
        memory_snapshot(tmp_path / "memory.pickle"),
    ):
        pass


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_memory_snapshot_is_written(tmp_path: Path) -> None:
    with memory_snapshot(tmp_path / "new" / "memory.pickle"):
        torch.zeros(1 << 20, device="cuda")
    assert (tmp_path / "new" / "memory.pickle").stat().st_size > 1000


# ---- plots


def made_up(folder: Path, shift: float, *, moe: bool) -> Path:
    """Two validation sets, three layers, and a learning rate with a warm-up."""
    noise = torch.Generator().manual_seed(int(shift * 100))
    with Metrics(folder, 0, stream=io.StringIO()) as log:
        log.log(0, **{"valid/web/loss": 3.4, "valid/code/loss": 2.9})
        for step in range(1, 401):
            value = 2 + 1.5 * math.exp(-step / 120) - shift * step / 400 + 0.15 * torch.randn((), generator=noise)
            log.step(step, tokens=65_536, loss=torch.as_tensor(value), lr=2e-4 * min(step / 40, 1 - (step - 40) / 400))
            layers = {f"balance/{n}/max_over_mean": 1 + (n + 1) * math.exp(-step / 100) / 2 for n in range(12)}
            layers |= {"balance/whole": 1 - step / 800} | {f"balance/{n}/whole": 1 - n * step / 8000 for n in range(12)}
            if step % 10 == 0:
                log.log(step, **(layers if moe else {}))
            if step % 100 == 0:
                level = 1.9 + 1.5 * math.exp(-step / 120) - shift * step / 400
                log.log(step, **{"valid/web/loss": level, "valid/code/loss": level - 0.5})
    return folder


def test_an_island_has_panels_of_its_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    with Metrics(tmp_path / "island-0", 0, stream=io.StringIO()) as log:
        for step in (1, 2):
            told = {f"islands/{name}": float(step) for name in ("bytes_up", "bytes_down", "stale", "unsent")}
            log.step(step, tokens=64, loss=torch.tensor(3.0), lr=1e-3, **told)
            log.log(step)
    plots.plot([tmp_path / "island-0", made_up(tmp_path / "plain", 0, moe=False)], tmp_path / "x.png")
    panels = {axes.get_title("left"): axes for axes in drawn[0].axes}
    for _, title, unit in plots.ISLANDS[:4]:
        assert panels[title].get_ylabel() == unit
        assert [list(line.get_ydata()) for line in panels[title].get_lines()] == [[1.0, 2.0]], (
            title
        )  # none of the other run
    assert len(panels["Islands: speed"].get_lines()) == 1


def test_names_are_drawn_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A name with two dollars is no formula, and one with a bell or an escape says so."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "$5 a run, $\\no more"
    with Metrics(folder, 0, stream=io.StringIO()) as log:
        log.log(0, **{"loss": 1.0, "tokens": 1, "valid/\x1b[31m\a$\\frac$/loss": 3.4})
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "one.png").symlink_to(tmp_path / "mine")
    plots.plot([folder], tmp_path / "one.png")
    assert (tmp_path / "mine").read_text() == "mine", "a link in a run's folder is replaced, not followed"
    assert (tmp_path / "one.png").stat().st_size > 10_000 and "missing from font" not in capfd.readouterr().err
    assert [*plots.read_runs([folder])[0].keys(plots.VALID)] == [r"\x1b[31m\x07$\frac$"]


def test_plots_of_two_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [made_up(tmp_path / "dense", 0.0, moe=False), made_up(tmp_path / "moe", 0.2, moe=True)]
    assert main([*map(str, runs), f"output={tmp_path / 'new' / 'both.png'}"]) == 0
    data = (tmp_path / "new" / "both.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 20_000


def test_a_plot_has_what_the_runs_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    moe, dense = made_up(tmp_path / "moe", 0.2, moe=True), made_up(tmp_path / "dense", 0, moe=False)
    plots.plot([moe, dense], tmp_path / "x.png")
    titles = [axes.get_title("left") for axes in drawn[0].axes if axes.get_title("left")]
    assert titles == [
        "Training loss",
        "Validation loss",
        "Learning rate",
        "Choices that are whole FFNs",
        "Load of the fullest expert - moe",
    ]
    train, valid, rate, whole, load, _ = drawn[0].axes
    rows = read(moe)
    raw = train.get_lines()[0]
    assert list(raw.get_ydata()) == [row["loss"] for row in rows if "loss" in row]
    assert list(raw.get_xdata()) == [row["tokens"] for row in rows if "loss" in row]
    assert [text.get_text() for text in train.get_legend().get_texts()] == ["moe", "dense"]
    assert [text.get_text() for text in valid.get_legend().get_texts()] == [
        "moe: web", "moe: code", "dense: web", "dense: code",
    ]  # fmt: skip
    assert list(valid.get_lines()[0].get_xdata()) == [65_536 * step for step in (0, 100, 200, 300, 400)]
    assert list(whole.get_lines()[0].get_ydata()) == [1 - step / 800 for step in range(10, 401, 10)]
    assert [text.get_text() for text in whole.get_legend().get_texts()] == ["moe"]
    assert plots.read_runs([moe])[0].by_layer("whole") == ([*range(12)], [1 - n / 20 for n in range(12)])
    assert rate.get_ylabel() == "learning rate" and load.get_ylabel() == "MoE layer"
    table = load.collections[0].get_array()
    assert table.shape == (12, 40) and table[11, 0] == pytest.approx(1 + 12 * math.exp(-0.1) / 2)
    assert all(axes.get_xlabel() == "tokens" for axes in (train, valid, rate, load))


def test_smoothing_neither_lags_nor_shifts() -> None:
    line = [10.0 - at / 100 for at in range(400)]
    assert plots.smoothed(line) == pytest.approx(line)
    jagged = [value + (-1) ** at for at, value in enumerate(line)]
    assert max(abs(a - b) for a, b in list(zip(plots.smoothed(jagged), line, strict=True))[10:-10]) < 0.1
    assert plots.smoothed([]) == [] and plots.smoothed([3.0]) == [3.0]


def test_the_time_left_is_not_of_an_interval_that_compiled_or_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock)
    with Metrics(tmp_path, steps=100, stream=io.StringIO()) as log:
        for step, seconds in enumerate([60.0, 2.0, 2.0, 500.0, *[2.0] * 4, *[1.0] * 6], 1):
            clock += seconds
            log.step(step, tokens=10)
            log.log(step)
    left = [row["eta_s"] for row in read(tmp_path / FILE)]
    assert left[0] == 99 * 60 and left[1:5] == [98 * 2, 97 * 2, 96 * 2, 95 * 2]
    assert left[-1] == 86, "of the newest intervals"


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / parent / "run" for parent in ("a", "b")]
    for folder in folders:
        run(folder, 0, 5)
    assert [found.name for found in plots.read_runs(folders)] == ["a/run", "b/run"]


def test_plots_refuse_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "output=x.png"]) == 2
    assert re.match(r"upcycle: .* does not exist; give the folder of a run", capsys.readouterr().err)
    with Metrics(tmp_path, stream=io.StringIO()) as log:
        log.log(0, other=1.0)
    with pytest.raises(ValueError, match="has no loss"):
        plots.plot([tmp_path], tmp_path / "x.png")
    run(tmp_path, 0, 5)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        plots.plot([tmp_path], tmp_path / "x.png")


def test_nothing_optional_is_imported_before_it_is_asked_for() -> None:
    import subprocess

    code = "import sys, training.observe.metrics, training.observe.plots, training.observe.profiling, training.checkpoint.state; print(*sys.modules)"
    root = Path(profiling.__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert not {"matplotlib", "tensorboard", "wandb", "mlflow", "trackio", "transformers", "deep_ep"} & set(
        found.split()
    )
