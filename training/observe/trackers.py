"""Send the rows of metrics.jsonl to trackers: TensorBoard, wandb, MLflow, trackio.

A tracker is a class in TRACKERS with `id` (of its run, to continue it), `log` and `close`. It gets the numbers of each
row at the row's step; a number that is not finite is left out. A resumed run continues the same run of the tracker:
TensorBoard removes the steps that are done again, and the others keep the first values of a step (trackers.json in the
run's folder says how far they are). A tracker that is new to the run gets the rows so far.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypedDict

from upcycle.cli.frame import missing
from upcycle.io import strict
from upcycle.io.disk import write_atomic

JSONL = "jsonl"  # metrics.jsonl, which is always written
STATE = "trackers.json"
Row = Mapping[str, Any]


class State(TypedDict):
    last: strict.Count  # the last step that any tracker has
    ids: Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """Say which run of a tracker to begin, or to continue."""

    folder: Path
    step: int  # the run continues after this step
    project: str
    name: str
    config: Mapping[str, Any]  # by dotted key, and the working directory's commit as `git`
    id: str | None = None  # of the tracker's run to continue


class Tracker(Protocol):
    id: str

    def __init__(self, start: Start) -> None: ...

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Send each row to every tracker. One that fails is left out, because the run is worth more than its copy."""

    def __init__(
        self, names: Sequence[str], start: Start, rows: Sequence[Row] = (), removed: Sequence[Row] = ()
    ) -> None:
        """`rows`: those that the resumed run keeps; `removed`: those after start.step, which it makes again."""
        self.running: dict[str, Tracker] = {}
        self.skipped: dict[str, range] = {}  # steps that a tracker has already
        names = [name for name in dict.fromkeys(names) if name != JSONL]
        check(names)
        self.path, self.last, ids = start.folder / STATE, 0, dict[str, str]()
        if start.step and self.path.is_file():
            state: State = strict.held(strict.read_json(self.path), State, str(self.path))
            self.last, ids = state["last"], dict(state["ids"])
        self.last = max([self.last, *(row["step"] for row in [*rows, *removed])])
        for name in names:
            known = ids.get(name)
            try:
                self.running[name] = TRACKERS[name](replace(start, id=known))
            except Exception as error:  # of whatever kind the package raises
                text = " ".join(str(error).split())
                raise ValueError(
                    f"log.to names {name}, which did not start: {text}; leave it out, or mend it"
                ) from error
            again = known and name != "tensorboard"
            self.skipped[name] = range(start.step + 1, self.last + 1) if again else range(0)
            for row in rows if known is None else ():
                self.send(name, row)
        self.keep()

    def keep(self) -> None:
        """Store what a resumed run needs to continue the same runs of the trackers."""
        if self.running or self.path.is_file():
            ids = {name: tracker.id for name, tracker in self.running.items()}
            write_atomic(self.path, json.dumps({"last": self.last, "ids": ids}).encode())

    def log(self, row: Row) -> None:
        for name in list(self.running):
            if row["step"] not in self.skipped[name]:
                self.send(name, row)

    def send(self, name: str, row: Row) -> None:
        numbers = {key: value for key, value in row.items() if key != "step" and value is not None}
        try:
            self.running[name].log(row["step"], {key: v for key, v in numbers.items() if math.isfinite(v)})
        except Exception as error:
            del self.running[name]
            self.keep()  # a resumed run begins another run in this tracker, with all rows
            warnings.warn(f"{name} failed and gets no more rows; metrics.jsonl has them ({error})", stacklevel=2)

    def close(self) -> None:
        for name, tracker in self.running.items():
            try:
                tracker.close()
            except Exception as error:
                warnings.warn(f"{name} did not close, and may lack rows that metrics.jsonl has ({error})", stacklevel=2)


def check(names: Sequence[str]) -> None:
    """Raise a ValueError if the package of a tracker is missing; each is called as its package."""
    for name in names:
        if name != JSONL and find_spec(name) is None:
            raise ValueError(f"log.to names {name}, but {missing(name)}, or leave {name} out")


def commit() -> str:
    """Return the git commit of the working directory, or "" if there is none."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


class TensorBoard:
    id = "tensorboard"  # its files are in the run's folder

    def __init__(self, start: Start) -> None:
        module = import_module("torch.utils.tensorboard")
        purged = 0 if start.id is None else start.step + 1  # and all later steps
        self.writer = module.SummaryWriter(str(start.folder / "tensorboard"), purge_step=purged)
        rows = "".join(f"|{key}|`{value}`|\n" for key, value in start.config.items())
        self.writer.add_text(start.name, f"|key|value|\n|---|---|\n{rows}", start.step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, start: Start) -> None:
        self.run = import_module("wandb").init(
            project=start.project, name=start.name, id=start.id, resume="allow", dir=str(start.folder),
            config=dict(start.config),
        )  # fmt: skip
        self.id = self.run.id

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Write to MLFLOW_TRACKING_URI, or to the folder mlruns in the working directory."""

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny writes local runs to files only
        module = import_module("mlflow")
        where = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").resolve().as_uri()
        self.client = module.MlflowClient(where)
        self.entities = module.entities
        if start.id is None:
            known = self.client.get_experiment_by_name(start.project)
            experiment = known.experiment_id if known else self.client.create_experiment(start.project)
            self.id = self.client.create_run(experiment, run_name=start.name).info.run_id
            params = [self.entities.Param(tidy(key), str(value)) for key, value in start.config.items()]
            for i in range(0, len(params), 100):  # as many as a request may have
                self.client.log_batch(self.id, params=params[i : i + 100])
        else:
            self.id = start.id
            self.client.update_run(self.id, status="RUNNING")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self.client.log_batch(self.id, [self.entities.Metric(tidy(name), v, now, step) for name, v in numbers.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)


def tidy(name: str) -> str:
    """Return a name that MLflow accepts, which is a path of its files."""
    return "/".join(re.sub(r"[^\w\-. ]", "_", part) for part in name.split("/") if part.strip("."))


class Trackio:
    """Write to TRACKIO_DIR, or to trackio's own folder in the user's cache."""

    def __init__(self, start: Start) -> None:
        self.run = import_module("trackio").init(
            project=start.project, name=start.name, config=dict(start.config), resume="must" if start.id else "never",
            auto_log_gpu=False, auto_log_cpu=False, embed=False,
        )  # fmt: skip
        self.id = self.run.id
        if start.id not in (None, self.id):
            self.run.finish()
            raise ValueError(f"project {start.project} has a newer run that is also called {start.name}")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
