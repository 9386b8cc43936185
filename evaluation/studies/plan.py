"""The plan of a study (`read_study`): arms and seeds, each pair a training config. Mistakes are found before training.

A trial is an arm with a seed. Its config is `config` (a ready one, if the arm or the base names it), over it the keys
of `base`, over them the arm's own, over them what the study sets: output, steps of a matched arm, and the seeds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from evaluation.studies.sample import SampleConfig
from training.config.resume import QUIET
from training.config.schema import TrainConfig
from training.data.shards import META
from training.observe.metrics import FILE as METRICS
from training.optim.schedule import schedule
from training.run.parts import source
from training.run.stages import flops_a_token
from upcycle.config.reading import build, keys_of, literal, read
from upcycle.config.ready import STUDY, TRAIN, UPCYCLE
from upcycle.io import strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.disk import write_atomic
from upcycle.plugin import nearest

MATCHES = ("flops", "seconds")
OWN = ("config", "match", "of")  # keys of an arm that are not training's
SET = ("output", "export", "seed", "data.seed", "model.upcycle.seed")  # set by the study, for each trial
INPUTS = "inputs.json"  # in the study's folder
NAME = re.compile(r"\w[\w.-]*")
ABOUT = """\
# {name} of a study. Alone: upcycle train {file}
# The order of the samples is a function of data.seed alone (training/data/mixture.py), so that all arms of a seed read
# the same ones; seed is of random weights, model.upcycle.seed of the routers' rows and of what a method draws.
"""


@dataclass(frozen=True)
class StudyConfig:
    output: str = ""  # the study's folder: study.html, study.json, and in runs/ARM/seed-N each run
    title: str = ""  # of the page; "": the folder's name
    source: str = ""  # the dense checkpoint, a folder or hub id: what ${source} stands for in the other keys
    tokens: str = ""  # a folder of folders of token shards: what ${tokens} stands for
    sample: Any = field(default_factory=dict)  # keys of sample.py, which makes OUTPUT/sample/dense and .../tokens
    base: Any = field(default_factory=dict)  # training keys that all arms share; `config`: a ready one to start from
    # name: training keys, and `config`; `match: flops` (or seconds) and `of: ARM`, where its steps follow from those
    arms: Any = field(default_factory=dict)
    control: str = ""  # the arm that the others are compared with; "": the first
    seeds: tuple[int, ...] = (0, 1, 2)  # of the order of the data and of routers; an interval needs three
    means: Any = field(default_factory=dict)  # name: validation sets, whose mean is a headline; {}: one of all sets
    suites: tuple[Any, ...] = ()  # of `upcycle eval`, before and after: names, or keys with `suite`
    timing: int = 30  # steps of the run that measures how fast an arm is, for match: seconds
    workers: int = 1  # runs at once
    devices: tuple[str, ...] = ()  # a CUDA_VISIBLE_DEVICES for each worker, in turn; (): as it is
    keep: bool = True  # the last checkpoints; false: removed when a run is over, suites that come later train it again
    judge: bool = False  # only make the page of what is there, also while the study runs

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("output is not set; write output=FOLDER for the study's runs and its page")
        for name in ("workers", "timing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {list(self.seeds)}; give different numbers, three or more for an interval")
        for name in ("sample", "base", "arms", "means"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be keys and values")
        if self.sample:
            sample_config(self)


@dataclass(frozen=True)
class Arm:
    name: str
    values: Mapping[str, Any]  # training keys, without those that a trial sets
    match: str = ""  # flops | seconds: steps follow from those of the arm `of`
    of: str = ""

    @cached_property
    def config(self) -> TrainConfig:
        try:
            return build(TrainConfig, self.values)
        except ValueError as error:
            raise ValueError(f"arm {self.name}: {error}") from None


@dataclass(frozen=True)
class Trial:
    arm: str
    seed: int
    folder: Path  # the run's
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def file(self) -> Path:
        return self.folder.with_suffix(".yaml")

    @cached_property
    def config(self) -> TrainConfig:
        return build(TrainConfig, self.values)

    def write(self) -> None:
        """Writes the config beside the run's folder. ValueError if the run has begun with another one."""
        if (self.folder / METRICS).exists() and self.file.exists():
            before = asdict(build(TrainConfig, strict.read_yaml(self.file)))
            if key := changed(before, asdict(self.config)):
                raise ValueError(
                    f"{self.folder} was trained with {key}={found(before, key)} and the study now says "
                    f"{found(asdict(self.config), key)}; change it back, or remove that folder"
                )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        about = ABOUT.format(name=self.name, file=self.file)
        write_atomic(self.file, (about + yaml.safe_dump(dict(self.values), sort_keys=False)).encode())


@dataclass(frozen=True)
class Plan:
    config: StudyConfig
    arms: Mapping[str, Arm]
    control: str
    means: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    def run_folder(self, arm: str, seed: int) -> Path:
        return self.folder / "runs" / arm / f"seed-{seed}"

    def trial(self, arm: str, seed: int, **more: Any) -> Trial:
        folder, values = self.run_folder(arm, seed), self.arms[arm].values
        model, data = values["model"], values["data"]
        if isinstance(model.get("upcycle"), Mapping):
            model = {**model, "upcycle": {**model["upcycle"], "seed": seed}}
        chosen = {"output": str(folder), "seed": seed, "model": model, "data": {**data, "seed": seed}}
        return Trial(arm, seed, folder, {**values, **chosen, **more})


def read_study(file: str, words: Sequence[str] = ()) -> Plan:
    return planned(read(StudyConfig, file, words, STUDY))


def planned(config: StudyConfig) -> Plan:
    if len(config.arms) < 2:
        raise ValueError(f"arms has {len(config.arms)} of them; a study compares two or more")
    arms = {name: arm_of(config, str(name), own) for name, own in config.arms.items()}
    control = config.control or next(iter(arms))
    for what, name in (("control", control), *((f"arms.{a.name}.of", a.of) for a in arms.values() if a.match)):
        if name not in arms:
            raise ValueError(f"{what} is {name!r}, which is no arm ({', '.join(arms)}){nearest(name, list(arms))}")
    for arm in arms.values():
        if arm.match and arms[arm.of].match:
            raise ValueError(f"arms.{arm.name}.of is {arm.of}, whose own steps follow from {arms[arm.of].of}; use that")
        if arm.config.stages:
            raise ValueError(f"arm {arm.name} has stages; arms are compared step by step: train it by itself")
        ours, theirs = (arms[name].config for name in (arm.name, control))
        if ours.data != theirs.data:
            key = changed(asdict(theirs.data), asdict(ours.data))
            raise ValueError(
                f"arm {arm.name} has data.{key}={found(asdict(ours.data), key)} and {control} has "
                f"{found(asdict(theirs.data), key)}; arms of a seed read the same samples: write data in base"
            )
    sets = [valid.name for valid in arms[control].config.data.valid]
    if not sets:
        raise ValueError(
            "base.data.valid names no validation set, and arms are judged by that; write base.data.valid=[FOLDER]"
        )
    return Plan(config, arms, control, means_of(config.means, sets))


def arm_of(config: StudyConfig, name: str, own: Any) -> Arm:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for an arm; it names a folder: letters, digits, '-', '_' and '.'")
    for where, keys in (("base", config.base), (f"arms.{name}", own)):
        if not isinstance(keys, Mapping):
            raise ValueError(f"{where} is {keys!r}; it must be training keys and values")
        for key in SET:
            if found(keys, key) is not None:
                raise ValueError(f"{where}.{key} is set; the study sets it for each run: leave it out, see seeds")
    match, of = str(own.get("match", "")), str(own.get("of", ""))
    if (match or of) and (match not in MATCHES or not of or "steps" in own):
        raise ValueError(
            f"arms.{name} has match={match!r}, of={of!r}{' and steps' if 'steps' in own else ''}; its steps "
            f"follow from another arm's: write match: {' or '.join(MATCHES)} and of: ARM, and no steps"
        )
    ready = own.get("config", config.base.get("config", ""))
    start = keys_of(ready, TRAIN) if ready else {}
    parts = [literal(keys) for keys in (start, plain(config.base), plain(own))]
    values: Any = OmegaConf.to_container(OmegaConf.merge(*parts), resolve=True)
    values = {"model": {}, "data": {}, **{key: value for key, value in values.items() if key not in SET}}
    for key in ("model", "data"):
        if not isinstance(values[key], dict):
            raise ValueError(f"{key} of arm {name} is {strict.short(values[key])}; it must be keys and values")
    upcycle = values["model"].get("upcycle")
    if isinstance(upcycle, str) and upcycle:  # a ready config: its keys instead of its name, because a seed joins them
        values["model"]["upcycle"] = keys_of(upcycle, UPCYCLE)
    model = values["model"]
    begins = model.get("upcycle") or model
    if not (begins.get("source") or begins.get("donors")):
        raise ValueError(
            f"arm {name} begins with no model; write source=FOLDER where the config says ${{source}}, or "
            f"arms.{name}.model.source=FOLDER"
        )
    return Arm(name, values, match, of)


def plain(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in OWN}


def means_of(given: Mapping[str, Any], sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    means = {str(name): tuple(map(str, inside)) for name, inside in given.items()} or {"all": tuple(sets)}
    for name, inside in means.items():
        for valid in inside or ("",):
            if valid not in sets:
                raise ValueError(
                    f"means.{name} names the validation set {valid!r}, and data.valid has {', '.join(sets)}"
                    f"{nearest(valid, list(sets))}"
                )
    return means


def sample_config(config: StudyConfig) -> SampleConfig:
    """Return the sample that a study begins with."""
    return build(SampleConfig, {**config.sample, "output": str(Path(config.output) / "sample")}, "sample.")


# ---- how long: equal tokens, equal FLOPs, equal seconds


def flops(plan: Plan) -> dict[str, float]:
    """FLOPs of a token, forward and backward, by arm. Opens each arm's model (headers alone), which finds mistakes."""
    costs = {}
    for name, arm in plan.arms.items():
        config = arm.config
        for kind in ("train", "valid"):
            for part in getattr(config.data, kind):
                if not (Path(part.path) / META).is_file():
                    raise ValueError(
                        f"data.{kind}: {part.path} is no folder of token shards; make it with python -m "
                        "upcycle prepare, or write tokens=FOLDER where the config says ${tokens}"
                    )
        try:
            with source(config) as origin:
                costs[name] = flops_a_token(config, origin.spec)
        except (ValueError, OSError) as error:
            raise ValueError(f"arm {name}: {error}") from None
    return costs


def check_inputs(plan: Plan) -> None:
    """Writes down what the models and data that are read are, by path. ValueError if runs have begun with others."""
    file, found = plan.folder / INPUTS, {}
    for arm in plan.arms.values():
        config, made = arm.config, arm.config.model.upcycle or {}
        for part in (*config.data.train, *config.data.valid):
            found[part.path] = hashlib.sha256((Path(part.path) / META).read_bytes()).hexdigest()
        models = {config.model.source, config.teacher.source, made.get("source", ""), *made.get("donors", ())}
        for name in models - {"", *found}:
            with Checkpoint.open(name) as checkpoint:
                found[name] = checkpoint.fingerprint()
    known: dict[str, str] = {}
    if file.is_file() and any(plan.folder.glob(f"runs/*/*/{METRICS}")):
        known = strict.held(strict.read_json(file), dict[str, str], str(file))
    for name, now in found.items():
        if known.get(name, now) != now:
            raise ValueError(
                f"{name} is not what the runs in {plan.folder} began with, so they cannot be compared with what is "
                "trained now; put it back, or write output=ANOTHER-FOLDER"
            )
    write_atomic(file, (json.dumps(known | found, indent=1) + "\n").encode())


def steps(plan: Plan, costs: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, int]:
    """Steps of each arm. costs: FLOPs of a token by arm; seconds: of a step, of the arms that are matched by them."""
    out = {}
    for name, arm in plan.arms.items():
        config, other = arm.config, plan.arms[arm.of or name].config
        if arm.match == "flops":
            ours, theirs = (costs[n] * tokens_of_step(c) for n, c in ((name, config), (arm.of, other)))
        else:
            ours, theirs = (seconds[name], seconds[arm.of]) if arm.match else (1.0, 1.0)
        out[name] = max(1, round(other.steps * theirs / ours))
        try:
            schedule(config.schedule, out[name])
        except ValueError as error:
            raise ValueError(f"arm {name}: {error}") from None
    return out


def tokens_of_step(config: TrainConfig) -> int:
    return config.batch * config.data.sequence


def trials(plan: Plan, lengths: Mapping[str, int]) -> list[Trial]:
    """Seed by seed, so that a study that is cut short has whole seeds."""
    return [plan.trial(arm, seed, steps=lengths[arm]) for seed in plan.config.seeds for arm in plan.arms]


def timed(plan: Plan, arm: str) -> Trial:
    """A short run that measures how fast an arm is, without validation, checkpoints and suites."""
    trial, folder, least = plan.trial(arm, 0), plan.folder / "timing" / arm, plan.config.timing
    data = {**trial.values["data"], "valid": []}
    rate = {**trial.values.get("schedule", {}), "warmup": 0}
    short = {"steps": least, "log_every": -(-least // 3), "valid_every": 0, "checkpoint": {"every": 0}, "eval": {}}
    values = {**trial.values, "output": str(folder), "data": data, "schedule": rate, **short}
    return Trial(f"timing of {arm}", trial.seed, folder, values)


# ---- keys


def found(values: Any, key: str) -> Any:
    """A dotted key's value in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first key that differs and changes what is learned; "" if none does."""
    flat = [dict(leaves({k: v for k, v in values.items() if k not in QUIET})) for values in (a, b)]
    keys = [*flat[0], *(key for key in flat[1] if key not in flat[0])]
    return next((key for key in keys if flat[0].get(key) != flat[1].get(key)), "")


def leaves(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", json.dumps(value, default=str)
