"""Write a run's files with lm-eval's EvaluationTracker; logged.py reads them.

samples_TASK_TIME.jsonl     before a metric is computed; with documents and prompts only if log_samples=true
results_TIME.json           last, whole or not at all: a folder with this file is whole
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval.loggers import EvaluationTracker

from evaluation.judge import logged
from evaluation.judge import metrics as measures
from evaluation.judge.logged import Samples
from upcycle.io import strict
from upcycle.io.disk import make_folder, sha256, write_atomic
from upcycle.io.publish import LOCK, digest

SECRET = re.compile(r"(?i)(^|[_-])(token|key|apikey|secret|password|passwd|auth|authorization|credentials?)$")
LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # name and password in an address
HIDDEN = "***"
CACHE = "cache"  # the folder of saved answers
BEGUN = (LOCK, CACHE, "samples_*.jsonl", "*.upcycle.tmp")  # files that a killed run leaves


def check_folder(folder: Path, asked: Mapping[str, Any], identity: str = "") -> None:
    """Refuse a folder that holds anything else than the evaluation that `asked` describes, finished or begun.

    `asked` holds the options that decide the answers; `identity` is the model's, after it is loaded.
    """
    found = sorted(folder.glob("results_*.json"))
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    stranger = next((path for path in there if not any(path.match(pattern) for pattern in BEGUN)), None)
    if stranger and not found:
        raise ValueError(
            f"{folder} holds {stranger.name}, which is not part of an evaluation; write output=FOLDER with a new one"
        )
    for path in found:
        before = strict.read_object(path, constants=True)
        if said := difference(before, asked, identity):
            raise ValueError(
                f"{folder} holds results of {said}; write output=FOLDER with a new one, or remove {folder}"
            )


def difference(before: Mapping[str, Any], asked: Mapping[str, Any], identity: str) -> str:
    """Return a clause that says how the results `before` differ from this evaluation; "" if they agree."""
    own, settings = before.get("upcycle"), before.get("config")
    if not isinstance(own, dict) or not isinstance(own.get("options"), dict) or not isinstance(settings, dict):
        return "another program's evaluation"
    what, options = f"{own.get('suite')} of {own.get('name')}", own["options"]
    key = next((key for key in asked if key in options and options[key] != asked[key]), "")
    if key:
        return f"{what} with {key}={strict.short(options[key])}, and this command has {key}={strict.short(asked[key])}"
    if identity and settings.get("model_identity", identity) != identity:
        return f"{what}, computed with other weights, settings or versions than this model's"
    return ""


def redacted(value: Any) -> Any:
    """Return JSON values with *** in place of secrets: texts under keys such as token, wherever else they stand too."""
    return hidden(value, sorted(secrets(value), key=len, reverse=True))


def secrets(value: Any) -> Iterator[str]:
    """Yield each text that a key such as token or password names."""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        if not isinstance(inner, str):
            yield from secrets(inner)
        elif inner and SECRET.search(str(key)):
            yield inner


def hidden(value: Any, known: Sequence[str], secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {key: hidden(inner, known, bool(SECRET.search(str(key)))) for key, inner in value.items()}
    if isinstance(value, list):
        return [hidden(inner, known) for inner in value]
    if not isinstance(value, str):
        return value
    if secret and value:
        return HIDDEN
    for each in known:
        if len(each) > 7:  # a shorter word may stand anywhere
            value = value.replace(each, HIDDEN)
    return LOGIN.sub(HIDDEN, value)


class Written:
    """Write the files of one run into its folder, in place of the same run's earlier files."""

    def __init__(self, folder: Path, tracker: EvaluationTracker) -> None:
        self.folder, self.tracker, self.sums = folder, tracker, dict[str, str]()
        tracker.output_path, tracker.date_id = (
            str(folder / "results.json"),
            datetime.now().isoformat().replace(":", "-"),
        )

    def save_samples(self, samples: Samples, configs: Mapping[str, Mapping[str, Any]], whole: bool) -> None:
        """Write every task's samples; `configs` are the tasks' configs, and `whole` keeps documents and prompts."""
        make_folder(self.folder)
        for pattern in ("results_*.json", "samples_*.jsonl"):
            for old in self.folder.glob(pattern):
                old.unlink()
        for name, rows in samples.items():
            path = self.folder / f"samples_{name}_{self.tracker.date_id}.jsonl"
            path.touch()
            self.tracker.save_results_samples(name, list(lines(name, rows, configs[name], whole)))
            with strict.naming(path), path.open("rb") as file:  # the tracker does not report a full disk
                if sum(1 for _ in file) != len(rows):
                    raise OSError(f"{path} could not be written whole; is the disk full?")
                os.fsync(file.fileno())
            self.sums[name] = sha256(path)

    def save_results(self, results: Mapping[str, Any], samples: Samples, own: Mapping[str, Any]) -> Path:
        """Write lm-eval's results, with ours under the key `upcycle` (logged.Own), and return the file."""
        with TemporaryDirectory() as scratch:
            self.tracker.output_path, time = str(Path(scratch) / "results.json"), self.tracker.date_id
            self.tracker.save_results_aggregated({**results, "upcycle": dict(own)}, samples)
            [path] = Path(scratch).glob("*.json")
            value = json.loads(path.read_text(encoding="utf-8"))
        value = redacted(value)
        value["upcycle"]["samples"] = self.sums
        value["upcycle"]["sum"] = digest(value)
        path = self.folder / f"results_{time}.json"
        write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
        return path


def lines(
    task: str, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], whole: bool
) -> Iterator[dict[str, Any]]:
    """Yield the samples for lm-eval's tracker: with finite numbers, in JSON types."""
    for row in rows:
        scores = {metric: measures.plain(row[metric]) for metric in row["metrics"]}
        answers = [answer for asked in row["resps"] for answer in asked]
        how = "the model's answer is not a finite number; try dtype=float32"
        logged.check_finite(task, row["doc_id"], [scores, measures.plain(answers)], how)
        line = {**row, **scores}
        if not whole:
            arguments = {
                n: {f"arg_{i}": each for i, each in enumerate(asked)} for n, asked in enumerate(row["arguments"])
            }
            choices = logged.choices_of(config, {"arguments": arguments})
            line |= {"doc": {}, "arguments": [], "choices": choices, "clusters": logged.clusters(row["doc"])}
            line["target"] = "" if config["output_type"] == "loglikelihood_rolling" else row["target"]
        yield line
