"""Measure whole training runs: seconds from the process's start to each mark until its end, and tokens a second.

  python -m benchmarks.whole_runs FOLDER CONFIG NAME="WORDS" NAME="WORDS" ... [turns=3]

  python -m benchmarks.whole_runs runs/whole slices dense="model.upcycle= model.source=base" \\
      slices="model.upcycle.source=base model.upcycle.experts=16"

An arm is `upcycle train CONFIG WORDS`. The arms run one after the other, and then the next turn begins, so that a slow
minute of the machine meets all of them. Runs and models are in a temporary folder of FOLDER. The output of a run stays in
FOLDER, and its marks are a line of FOLDER/rows.jsonl. The same command continues after the runs in that file.

Marks: the validation before the first step, the first and the last logged step, the line that names the saved model,
and the end of the process. A speed is the median of the logged steps between the twentieth and the last. The table
divides each arm's medians by the first arm's. Add `log_every=1` to WORDS to see the first step itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from upcycle.cli import frame

SPEEDS_FROM = 20  # steps before it also compile, record and fill caches
ARM = re.compile(r"(\w+)=(.*[= ].*)", re.DOTALL)


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    turns = int(dict(word.split("=", 1) for word in words if word.startswith("turns=")).get("turns", "3"))
    rest = [word for word in words if not word.startswith("turns=")]
    if len(rest) < 3:
        raise ValueError(f'got {rest}; write FOLDER CONFIG and at least one arm, NAME="model.source=MODEL ..."')
    folder, config, *named = rest
    arms = [ARM.fullmatch(word) for word in named]
    if None in arms:
        raise ValueError(f'{named[arms.index(None)]} is no arm; write NAME="model.source=MODEL ..."')
    asked = {arm[1]: ["train", config, *arm[2].split()] for arm in arms if arm}
    path = Path(folder) / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for turn in range(1, turns + 1):
        for name, command in asked.items():
            if any(row["turn"] == turn and row["arm"] == name and row["command"] == command for row in rows):
                continue
            rows.append(
                {"turn": turn, "arm": name, "command": command, **measured(command, path.parent, f"{name}-{turn}")}
            )
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table([row for row in rows if asked.get(row["arm"]) == row["command"]]))
    return 0


def measured(command: list[str], folder: Path, name: str) -> dict[str, float]:
    """Run a training, and return its marks in seconds and its speed."""
    marks: dict[str, float] = {}
    said = folder / f"{name}.log"
    with TemporaryDirectory(dir=folder) as made, said.open("w") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "upcycle", *command, f"output={made}/run", f"export={made}/model"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        for line in process.stdout or ():
            now = round(time.monotonic() - started, 2)
            log.write(f"{now:8.2f} {line}")
            if re.match(r"step 0 +valid", line):
                marks["validated"] = now
            elif at := re.match(r"step (\d+)/(\d+) ", line):
                marks.setdefault("first logged step", now)
                if at[1] == at[2]:
                    marks["last step"] = now
            elif " is trained: " in line:
                marks["saved"] = now
        if process.wait():
            raise ValueError(f"{name} ended with exit code {process.returncode}; {said} has what it printed")
        marks["ended"] = round(time.monotonic() - started, 2)
        steps = [json.loads(line) for line in (Path(made) / "run" / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["tokens_per_s"] for row in steps if "tokens_per_s" in row and row["step"] >= SPEEDS_FROM]
    return {**marks, "tokens/s": median(speeds[:-1] or speeds)} if speeds else marks


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a row for each arm and mark: the turns, their median, and it over the first arm's."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    turns = sorted({row["turn"] for row in rows})
    lines = [
        f"| mark | arm | {' | '.join(f'turn {turn}' for turn in turns)} | over {arms[0]} |",
        "|---" * (len(turns) + 3) + "|",
    ]
    for mark in ("validated", "first logged step", "last step", "saved", "ended", "tokens/s"):
        found = {arm: {row["turn"]: row[mark] for row in rows if row["arm"] == arm and mark in row} for arm in arms}
        for arm, marks in found.items():
            if marks:
                cells = [f"{marks[turn]:,.1f}" if turn in marks else "" for turn in turns]
                first = found[arms[0]].values()
                over = f"{median(marks.values()) / median(first):.2f}" if first else ""
                lines.append(f"| {mark} | {arm} | {' | '.join(cells)} | {over} |")
    return "\n".join(lines)


if __name__ == "__main__":
    frame.program("benchmarks.whole_runs")
