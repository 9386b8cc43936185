"""What a report knows of trainings: groups of runs that are seeds of an arm, what they spent, how they were made."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.judge import compare, curves
from evaluation.judge.compare import Losses
from evaluation.judge.curves import Band, Spent
from training.checkpoint.storage import read_manifest
from training.config.resume import flat, shown
from training.config.schema import ModelConfig, TrainConfig
from training.observe import plots
from upcycle.io import strict

MEAN = "mean of sets"  # of validation
Bands = dict[str, tuple[Band, ...]]  # by MEAN or a set


@dataclass(frozen=True)
class Arm:
    """A group of trainings, a run a seed."""

    runs: tuple[str, ...]
    spent: Spent  # mean over seeds, to the end
    compared: Spent  # the same, up to where losses are compared
    memory_gb: float  # the most
    commands: tuple[str, ...]


# ---- their names


def shared(names: Sequence[str]) -> str:
    """What the names of seeds have in common: copies, of copies/seed-0 and copies/seed-1; all of them if nothing."""
    if len(set(names)) == 1:
        return names[0]
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    start = names[0][: [*same, False].index(False)]
    start = re.sub(r"\d+$", "", start) if any(name[len(start) :][:1].isdecimal() for name in names) else start
    return re.sub(r"(^|[\W_]+)((seed|run)[\W_]*)?$", "", start) or ", ".join(names)


def read_arms(groups: Sequence[Sequence[Path]]) -> dict[str, tuple[Sequence[Path], Sequence[plots.Curves]]]:
    """Folders and runs of each group, by a name: what its runs' names have in common, or all of them."""
    every = [folder for folders in groups for folder in folders]
    read = iter(plots.read_runs(every) if every else [])
    found = [(folders, [next(read) for _ in folders]) for folders in groups]
    names = [shared([run.name for run in runs]) for _, runs in found]
    whole = [", ".join(run.name for run in runs) for _, runs in found]
    names = [name if names.count(name) == 1 else long for name, long in zip(names, whole, strict=True)]
    return dict(zip(names, found, strict=True))


# ---- what they reached, and spent


def arm(folders: Sequence[Path], runs: Sequence[plots.Curves], losses: Losses | None) -> Arm:
    ends = [max((row["tokens"] for row in run.rows if row.get("tokens")), default=0.0) for run in runs]
    memory = [row["memory_gb"] for run in runs for row in run.rows if row.get("memory_gb")]
    return Arm(
        tuple(run.name for run in runs),
        curves.average([spent_at(run, end) for run, end in zip(runs, ends, strict=True)]),
        curves.average([spent_at(run, losses.tokens if losses else end) for run, end in zip(runs, ends, strict=True)]),
        max(memory, default=0.0),
        tuple(map(command, folders)),
    )


def spent_at(run: plots.Curves, tokens: float) -> Spent:
    counted = [row for row in run.rows if row.get("tokens")]
    at = np.interp(tokens, [0.0, *(row["tokens"] for row in counted)], [0.0, *(row["step"] for row in counted)])
    return curves.spending(run.rows)(float(at))


def losses_of(arms: Mapping[str, tuple[Sequence[Path], Sequence[plots.Curves]]]) -> Losses | None:
    """Losses of all arms beside the first; None unless all have a validation set in common."""
    sets = [set(run.keys(plots.VALID)) for _, runs in arms.values() for run in runs]
    if len(arms) < 2 or not set.intersection(*sets):
        return None
    found, (first, *others) = compare.compare_losses([folders for folders, _ in arms.values()]), arms
    tokens, flops = (
        dict(zip(others, by.values(), strict=False)) for by in (found.at_equal_tokens, found.at_equal_flops)
    )  # without FLOPs in a log there are none
    return replace(found, runs=(first, *others), at_equal_tokens=tokens, at_equal_flops=flops)


def bands(arms: Mapping[str, Sequence[plots.Curves]]) -> tuple[Bands, Bands]:
    """(curves of validation, differences to the first arm), over seeds."""
    every = [run.keys(plots.VALID) for runs in arms.values() for run in runs]
    sets = list(dict.fromkeys(name for found in every for name in found))
    both = [name for name in sets if all(name in found for found in every)]
    drawn, beside = Bands(), Bands()
    for what, inside in ((MEAN, both), *((name, [name]) for name in sets if len(sets) > 1)):
        if not inside:
            continue
        by_arm = {name: [validation(run, inside) for run in runs] for name, runs in arms.items()}
        drawn[what] = tuple(one for name, found in by_arm.items() if (one := curves.band(name, found)).mean)
        first, *others = by_arm
        made = (
            curves.difference_band(name, list(zip(by_arm[name], by_arm[first], strict=True)))
            for name in others
            if len(by_arm[name]) == len(by_arm[first])
        )
        beside[what] = tuple(one for one in made if one)
    return drawn, beside


def validation(run: plots.Curves, sets: Sequence[str]) -> curves.Curve:
    spent = curves.spending(run.rows)
    return curves.mean_curve([curves.points(run.rows, f"valid/{name}/loss", spent) for name in sets])


def config_of(folder: Path) -> dict[str, Any]:
    """The settings of a run; none where it has no config.json."""
    path = folder / "config.json"
    return strict.read_object(path) if path.is_file() else {}


def differing(arms: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Every key of the configs that two runs have otherwise, and what it is in each arm, seed by seed."""
    every = [[flat(config) for config in configs] for configs in arms]
    rows = []
    for key in dict.fromkeys(key for configs in every for config in configs for key in config):
        values = [[shown(config.get(key)) for config in configs] for configs in every]
        if len({value for mine in values for value in mine}) > 1:
            rows.append((key, *(mine[0] if len(set(mine)) == 1 else ", ".join(mine) for mine in values)))
    return rows


def command(folder: Path) -> str:
    """The command that makes the run in `folder` from nothing: all that is not a default; "" without a config."""
    config = config_of(folder)
    if not config:
        return ""
    defaults = asdict(TrainConfig(model=ModelConfig(source="?")))
    defaults["model"]["source"] = ""
    known = dict(leaves(defaults))
    words = [word(key, value) for key, value in leaves(config) if key not in known or known[key] != value]
    count = ranks(folder)
    return shlex.join(["upcycle", "train", *words, *([f"nproc={count}"] if count > 1 else [])])


def ranks(folder: Path) -> int:
    """How many processes trained the run, as its newest checkpoint says; 1 if none is left to say it."""
    for step in sorted(folder.glob("checkpoints/step-*"), reverse=True):
        with suppress(ValueError):
            return int(read_manifest(step).get("world", 1))
    return 1


def leaves(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", list(value) if isinstance(value, tuple) else value


def word(key: str, value: Any) -> str:
    """key=value as a command reads it, as YAML: there 1e-08 and true would be a text and a truth."""
    if isinstance(value, str):
        with suppress(ValueError):
            if not value or strict.parse_yaml(value, key) == value:
                return f"{key}={value}"
    text = json.dumps(value)
    return f"{key}={text.replace('e', '.0e', 1) if isinstance(value, float) and '.' not in text else text}"
