"""Show a run: a live line, metrics.jsonl, and the trackers that the config asks for.

    with Metrics(folder, first, steps=config.steps, flops=flops) as metrics:
        for ...:
            metrics.step(step, tokens=..., lr=..., loss=loss)   # device tensors; this does not wait for the device
            if due: metrics.log(step, **more)                   # one copy to the host for an interval

metrics.jsonl has one JSON object per line: `step`, and the values of that step. A floating tensor is a mean over the
steps since the last line, without the values that are not finite (null if there is no other); any other value is the
latest. Validation may add a second line for its step, and `read` joins the two. A resumed run removes the lines after
the step that it resumes from, so the file equals the file of a run that never stopped. One exception: if the checkpoint
lies between two lines, the first means cover only the steps since the checkpoint. Only rank 0 writes; values are
reduced before. Each line ends with its checksum (`crc`), so a damaged line is named and left out, and the others stay.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.observe import trackers
from training.observe.flops import throughput
from upcycle.io import strict
from upcycle.io.disk import naming, write_all, write_atomic

FILE = "metrics.jsonl"
BEFORE = "metrics.before.jsonl"  # the file of a run that left no checkpoint to resume from
DAMAGED = "metrics.damaged.jsonl"  # the file with its damaged lines, as a resume found it
CRC = b', "crc": '  # before a line's checksum, its last key
LOAD = "balance/max_over_mean"
RECENT = 9  # number of intervals from which the time left is estimated
Value = Tensor | float


class Metrics:
    """Collect a run's metrics and write them.

    steps: of the whole run, for the ETA. flops: of a token, forward and backward. gpus: number of GPUs that share the
    tokens. planned: returns how many tokens the first steps of the run take, if steps differ in that."""

    def __init__(
        self,
        folder: Path,
        resume_step: int = 0,
        *,
        steps: int = 0,
        flops: float = 0.0,
        planned: Callable[[int], int] | None = None,
        gpus: int = 1,
        to: Sequence[str] = (),  # trackers, in addition to metrics.jsonl
        project: str = "upcycle",  # the trackers' name for a group of runs
        name: str = "",  # the trackers' name for the run; "": its folder's
        config: Mapping[str, Any] | None = None,  # by dotted key; trackers show it
        stream: IO[str] | None = None,
    ) -> None:
        self.steps, self.flops, self.gpus = steps, flops, gpus
        self.stage = 0  # 0 in a run of one stage
        self.before = 0, 0.0  # tokens and FLOPs of earlier stages
        self.quiet = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.resumed, self.line = resume_step, Line(stream or sys.stderr)
        self.pending: dict[str, list[Value]] = {}
        self.tokens = self.taken = 0  # tokens since the run began; steps since the last line
        self.paces: deque[float] = deque(maxlen=RECENT)
        if self.quiet:
            return
        folder.mkdir(parents=True, exist_ok=True)
        kept, removed = cut(folder, resume_step)
        counted = next((row for row in reversed(kept) if "tokens" in row), None)
        made = (lambda step: step) if planned is None else planned
        self.tokens_at_resume = None if planned is None else made(resume_step)
        if counted:
            self.tokens_at_resume = round(counted["tokens"] * made(resume_step) / made(counted["step"]))
        about = {**(config or {}), "git": trackers.commit()}
        start = trackers.Start(folder, resume_step, project, name or folder.resolve().name, about)
        self.trackers = trackers.Trackers(to, start, kept, removed)
        self.path = folder / FILE
        self.file = open(self.path, "a")  # noqa: SIM115 - close() closes it
        self.restart()

    def enter(self, stage: int, flops: float, tokens: int = 0, work: float = 0.0, say: str = "") -> None:
        """Begin a stage, whose tokens cost `flops` each, after `tokens` that cost `work`."""
        self.stage, self.flops, self.before = stage, flops, (tokens, work)
        if say and not self.quiet:
            self.line.keep(say)

    def step(self, step: int, *, tokens: int, **values: Value) -> None:
        """Store a training step: tokens of all ranks, and numbers or scalar tensors that the device may still
        compute."""
        if self.quiet:
            return
        if not self.tokens:
            at_resume = self.tokens_at_resume
            self.tokens = self.resumed * tokens if at_resume is None else at_resume
            self.interval_start = self.tokens
        self.tokens += tokens
        self.taken += 1
        for name, value in values.items():
            # copy it, because the owner may change it in place before it is read
            self.pending.setdefault(name, []).append(value.detach().clone() if isinstance(value, Tensor) else value)

    def log(self, step: int, **values: Value) -> None:
        """Write a line for the steps since the last line and for `values`; write nothing if there are neither."""
        if self.quiet or not (self.taken or values):
            return
        numbers = fetch({**self.pending, **{name: [value] for name, value in values.items()}})
        row: dict[str, Any] = {"step": step} | ({"stage": self.stage} if self.stage else {})
        if self.taken:
            row |= self.speed(step)  # after fetch, which waited for the device
        row |= numbers
        with naming(self.path):
            line = written({n: v if math.isfinite(v) else None for n, v in row.items()})
            write_all(self.file.fileno(), memoryview(line.encode()))  # a buffer would keep what the disk refused
        self.trackers.log(row)
        if self.taken:
            self.line.show(describe(row, self.steps))
        if text := validation(row):
            self.line.keep(text)
        self.restart()

    def sync(self) -> None:
        """Wait until the lines are on disk, because a checkpoint that survives a crash must not be newer than the
        log."""
        if not self.quiet:
            with naming(self.path):
                os.fsync(self.file.fileno())

    def speed(self, step: int) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        rate = (self.tokens - self.interval_start) / seconds
        row: dict[str, Any] = {"tokens": self.tokens, "seconds_per_step": seconds / self.taken, "tokens_per_s": rate}
        if self.flops:
            found = throughput(self.flops, rate / self.gpus, self.device)
            row["tflops"] = found.tflops
            tokens, work = self.before
            # total so far, like `tokens`, because runs are also compared at equal FLOPs
            row["flops"] = work + self.flops * (self.tokens - tokens)
            if found.mfu is not None:
                row["mfu"] = found.mfu
        row["memory_gb"] = memory_gb()
        if self.steps:
            # the lower median, because an interval that compiled or waited does not predict the next ones
            self.paces.append(row["seconds_per_step"])
            row["eta_s"] = (self.steps - step) * median_low(self.paces)
        return row

    def restart(self) -> None:
        """Begin the next interval here, because time since the last step, such as validation, is not training time."""
        self.pending, self.taken, self.interval_start = {}, 0, self.tokens
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()

    def close(self) -> None:
        if self.quiet:
            return
        self.line.end()
        self.sync()
        self.file.close()
        self.trackers.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(values: Mapping[str, list[Value]]) -> dict[str, Any]:
    """Return means of floating tensors and the latest of all other values. Copy all tensors of a device at once."""
    tensors = [(name, value) for name, found in values.items() for value in found if isinstance(value, Tensor)]
    numbers: dict[str, list[float]] = {}
    for device in {value.device for _, value in tensors}:
        mine = [(name, value) for name, value in tensors if value.device == device]
        host = torch.stack([value.reshape(()).double() for _, value in mine]).tolist()
        for (name, _), number in zip(mine, host, strict=True):
            numbers.setdefault(name, []).append(number)
    out: dict[str, Any] = {}
    for name, found in values.items():
        last = found[-1]
        if not isinstance(last, Tensor):
            out[name] = last
        elif last.is_floating_point():
            finite = [number for number in numbers[name] if math.isfinite(number)]
            out[name] = sum(finite) / len(finite) if finite else math.nan
        else:
            out[name] = int(numbers[name][-1])
    return out


def memory_gb() -> float:
    """Return the peak memory of the device in this interval, or of this process since it began if there is no
    device."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource  # some systems lack it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)  # macOS counts bytes, other systems KiB


# ---- metrics.jsonl


def read(path: Path) -> list[dict[str, Any]]:
    """Return one row per step, in order, with the lines of a step joined. `path`: the file or the run's folder."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a run, which contains {FILE}")
    return joined(parse(path))


def joined(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per step, in order."""
    rows: dict[int, dict[str, Any]] = {}
    for row in lines:
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def written(row: Mapping[str, Any]) -> str:
    """Return a row as a line that ends with its checksum."""
    text = json.dumps(row)
    return f"{text[:-1]}{CRC.decode()}{zlib.crc32(text.encode())}}}\n"


def parse(path: Path) -> list[dict[str, Any]]:
    """Return the file's rows. Leave out damaged lines, such as a torn last one, and name them in a warning."""
    rows, bad = intact(path)
    name_damage(path, bad)
    return rows


def name_damage(path: Path, bad: Sequence[tuple[int, str]]) -> None:
    if bad:
        numbers = ", ".join(str(number) for number, _ in bad[:5]) + (", ..." if len(bad) > 5 else "")
        many = f"lines {numbers} are" if len(bad) > 1 else f"line {numbers} is"
        warnings.warn(f"{path}: {many} damaged and left out ({bad[0][1]})", stacklevel=4)


def intact(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Return the file's rows without checksums, and (number, reason) of each damaged line."""
    found, bad = list[tuple[int, dict[str, Any], bool]](), list[tuple[int, str]]()
    for number, (where, line) in enumerate(strict.read_lines(path), 1):
        body, marked, crc = line.rpartition(CRC)
        try:
            if marked and crc != b"%d}" % zlib.crc32(body + b"}"):
                raise ValueError("its checksum differs")
            row = strict.parse(body + b"}" if marked else line, where)
            strict.held(row.get("step") if isinstance(row, dict) else None, strict.Count, where)
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        for key, value in row.items():
            if value is not None and not strict.is_number(value):
                raise ValueError(f"{where} has {key:.60}={strict.short(value)}; it must be a number, or null")
        found.append((number, row, bool(marked)))
    signed = any(marked for *_, marked in found)  # older versions wrote no checksums; a resume adds them
    bad += [(number, "it lost its checksum") for number, _, marked in found if signed and not marked]
    return [row for _, row, marked in found if marked or not signed], sorted(bad)


def cut(folder: Path, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove the lines after `step` from the file, in one move, and return (the rows that stay, those removed). If the
    run begins at step 0, or if lines before the last row are damaged, keep the old file under another name."""
    path = folder / FILE
    if not path.exists():
        return [], []
    if step == 0:
        os.replace(path, folder / BEFORE)
        return [], []
    every, bad = intact(path)
    name_damage(path, bad)
    if bad and bad[0][0] <= len(every):  # not only a torn last line
        shutil.copyfile(path, folder / DAMAGED)
    rows = [row for row in every if row["step"] <= step]
    write_atomic(path, "".join(map(written, rows)).encode())
    return rows, [row for row in every if row["step"] > step]


# ---- the live line


class Line:
    """Show progress: one line that is overwritten on a terminal, a new line per interval in a log file."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.live = stream, stream.isatty()
        self.open = False

    def show(self, text: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns
            self.stream.write("\r\x1b[K" + text[: width - 1])
            self.open = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def keep(self, text: str) -> None:
        """Write a line that stays."""
        self.end()
        self.stream.write(text + "\n")
        self.stream.flush()

    def end(self) -> None:
        if self.open:
            self.stream.write("\n")
            self.open = False


def describe(row: Mapping[str, Any], steps: int) -> str:
    parts = [f"step {row['step']}" + (f"/{steps}" if steps else "")]
    for name, form in FORMS.items():
        if name in row:
            parts.append(form(row[name]))
    if row.get("skipped"):
        parts.append(f"skipped {row['skipped']}")
    return "  ".join(parts)


def validation(row: Mapping[str, Any]) -> str:
    found = {name.removeprefix("valid/"): value for name, value in row.items() if name.startswith("valid/")}
    return f"step {row['step']}  valid  " + "  ".join(f"{n} {v:.4f}" for n, v in found.items()) if found else ""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


FORMS: dict[str, Callable[[float], str]] = {
    "loss": lambda v: f"loss {v:.4f}",
    "tokens_per_s": lambda v: f"{v:,.0f} tok/s",
    "tflops": lambda v: f"{v:.3g} TFLOP/s",
    "mfu": lambda v: f"MFU {v:.1%}",
    "memory_gb": lambda v: f"{v:.1f} GB",
    LOAD: lambda v: f"load {v:.2f}",
    "balance/whole": lambda v: f"whole {100 * v:.3g}%",
    "balance/dropped": lambda v: f"dropped {100 * v:.3g}%",  # only with a capacity
    "lr": lambda v: f"lr {v:.2e}",
    "grad_norm": lambda v: f"grad {v:.3g}",
    "eta_s": lambda v: f"ETA {duration(v)}",
}
