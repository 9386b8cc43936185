"""Plan a study (`read_study`): arms and seeds, each pair a training config. Mistakes are found before training.

A trial is an arm with a seed. Its config is `config` (a ready one, if the arm or the base names it), over it the keys
of `base`, over them the arm's own, over them what the study sets: output, steps of a matched arm, and the seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf

from evaluation.studies.sample import SampleConfig
from training.config.resume import QUIET, flat
from training.config.schema import TrainConfig
from training.observe.metrics import FILE as METRICS
from upcycle.config.reading import build, keys_of, literal, read
from upcycle.config.ready import STUDY, TRAIN, UPCYCLE
from upcycle.io import strict
from upcycle.io.disk import write_atomic
from upcycle.plugin import nearest

MATCHES = ("flops", "seconds")
QUESTIONS = {"tokens": "equal tokens", "flops": "equal FLOPs", "seconds": "equal seconds"}
OWN = ("config", "match", "of")  # keys of an arm that are not training's
SET = ("output", "export", "seed", "data.seed", "model.upcycle.seed")  # set by the study, for each trial
NAME = re.compile(r"\w[\w.-]*")
ABOUT = """\
# {name} of a study. Alone: upcycle train {file}
# The order of the samples is a function of data.seed alone (training/data/mixture.py), so that all arms of a seed read
# the same ones; seed is of random weights, model.upcycle.seed of the routers' rows and of what a method draws.
"""


@dataclass(frozen=True)
class StudyConfig:
    ELSEWHERE: ClassVar = {"tokens": "data, and ${data} where a config says ${tokens}"} | dict.fromkeys(
        ("model", "steps", "schedule", "batch"), "this below base or an arm; a config of one run is for upcycle train"
    )

    output: str = ""  # the study's folder: study.html, study.json, and in runs/ARM/seed-N each run
    title: str = ""  # of the page; "": the folder's name
    source: str = ""  # the dense checkpoint, a folder or hub id: what ${source} stands for in the other keys
    data: str = ""  # a folder of folders of token shards: what ${data} stands for
    sample: Any = field(default_factory=dict)  # keys of sample.py, which makes OUTPUT/sample/dense and .../tokens
    base: Any = field(default_factory=dict)  # training keys that all arms share; `config`: a ready one to start from
    # name: training keys, and `config`; `match: flops` (or seconds) and `of: ARM`, where its steps follow from those
    arms: Any = field(default_factory=dict)
    control: str = ""  # the arm that the others are compared with; "": the first
    seeds: tuple[int, ...] = (0, 1, 2)  # of the order of the data and of routers; an interval needs three
    means: Any = field(default_factory=dict)  # name: validation sets, whose mean is a headline; {}: one of all sets
    # the one comparison whose p is not corrected for the others, named before training: {arm: ARM, at: tokens | flops |
    # seconds, mean: a name of `means`}; {}: none, so that all are corrected
    primary: Any = field(default_factory=dict)
    suites: tuple[Any, ...] = ()  # of `upcycle eval`, before and after: names, or keys with `suite`
    timing: int = 30  # steps of the run that measures how fast an arm is, for match: seconds
    workers: int = 1  # runs at once
    devices: tuple[str, ...] = ()  # a CUDA_VISIBLE_DEVICES for each worker, in turn; (): as it is
    keep: bool = True  # the last checkpoints; false: removed when a run is over, suites that come later train it again
    judge: bool = False  # only make the page of what is there, also while the study runs

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("sample", "base", "arms", "means", "primary")}
        alike = len(set(self.seeds)) < len(self.seeds)
        wrong = {
            "output is not set; write output=FOLDER for the study's runs and its page": not self.output,
            f"workers is {self.workers}; it must be at least 1": self.workers < 1,
            f"timing is {self.timing}; it must be at least 1": self.timing < 1,
            f"seeds is {[*self.seeds]}; give different numbers, three or more for an interval": alike or not self.seeds,
        }
        wrong |= {f"{k} is {v!r}; it must be keys and values": not isinstance(v, Mapping) for k, v in values.items()}
        if said := next((sentence for sentence, is_so in wrong.items() if is_so), ""):
            raise ValueError(said)
        if self.sample:
            sample_config(self)


def sample_config(config: StudyConfig) -> SampleConfig:
    """Return the config of what makes `sample`."""
    return build(SampleConfig, {**config.sample, "output": str(Path(config.output) / "sample")}, "sample.")


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
        """Write the config next to the run's folder. Raise a ValueError if the run has begun with another one."""
        if (self.folder / METRICS).exists() and self.file.exists():
            before, now = asdict(build(TrainConfig, strict.read_yaml(self.file))), asdict(self.config)
            if key := changed(before, now):
                raise ValueError(
                    f"{self.folder} was trained with {key}={found(before, key)} and the study now says "
                    f"{found(now, key)}; change it back, or remove that folder"
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


# ---- from a config to a plan


def read_study(file: str, words: Sequence[str] = ()) -> Plan:
    return planned(read(StudyConfig, file, words, STUDY))


def planned(config: StudyConfig) -> Plan:
    """Return the plan of a config. Raise a ValueError about the first thing that is wrong."""
    if len(config.arms) < 2:
        raise ValueError(f"arms has {len(config.arms)} of them; a study compares two or more")
    arms = {name: arm_of(config, str(name), own) for name, own in config.arms.items()}
    control = config.control or next(iter(arms))
    check_name("control", control, arms, "arm")
    for arm in arms.values():
        check_arm(arm, arms, control)
    sets = [valid.name for valid in arms[control].config.data.valid]
    if not sets:
        raise ValueError(
            "base.data.valid names no validation set, and arms are judged by that; write base.data.valid=[FOLDER]"
        )
    means = {str(name): tuple(map(str, inside)) for name, inside in config.means.items()} or {"all": tuple(sets)}
    for name, inside in means.items():
        for valid in inside or ("",):
            check_name(f"means.{name}", valid, sets, "validation set of data.valid")
    if config.primary:
        known: dict[str, Any] = {"arm": arms, "at": QUESTIONS, "mean": means}
        if config.primary.keys() != known.keys():
            raise ValueError(f"primary is {dict(config.primary)}; write primary={{arm: ARM, at: tokens, mean: MEAN}}")
        for key, names in known.items():
            check_name(f"primary.{key}", config.primary[key], names, "question" if key == "at" else key)
    return Plan(config, arms, control, means)


def check_name(key: str, name: Any, known: Any, what: str) -> None:
    """Raise a ValueError unless a key names one of those that are known."""
    if name not in known:
        raise ValueError(f"{key} is {name!r}, which is no {what} ({', '.join(known)}){nearest(str(name), list(known))}")


def check_arm(arm: Arm, arms: Mapping[str, Arm], control: str) -> None:
    """Raise a ValueError unless the arm can be compared with the control."""
    if arm.match:
        check_name(f"arms.{arm.name}.of", arm.of, arms, "arm")
        if arms[arm.of].match:
            raise ValueError(f"arms.{arm.name}.of is {arm.of}, whose own steps follow from {arms[arm.of].of}; use that")
    if arm.config.stages:
        raise ValueError(f"arm {arm.name} has stages; arms are compared step by step: train it by itself")
    ours, theirs = (asdict(arms[name].config.data) for name in (arm.name, control))
    if key := changed(theirs, ours):
        raise ValueError(
            f"arm {arm.name} has data.{key}={found(ours, key)} and {control} has {found(theirs, key)}; arms of a seed "
            "read the same samples: write data in base"
        )


def arm_of(config: StudyConfig, name: str, own: Any) -> Arm:
    """Merge an arm's keys over those of the base and of the ready config that either names."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for an arm; it names a folder: letters, digits, '-', '_' and '.'")
    check_keys("base", config.base)
    check_keys(f"arms.{name}", own)
    match, of = str(own.get("match", "")), str(own.get("of", ""))
    if (match or of) and (match not in MATCHES or not of or "steps" in own):
        raise ValueError(
            f"arms.{name} has match={match!r}, of={of!r}{' and steps' if 'steps' in own else ''}; its steps "
            f"follow from another arm's: write match: {' or '.join(MATCHES)} and of: ARM, and no steps"
        )
    ready = own.get("config", config.base.get("config", ""))
    parts = [keys_of(ready, TRAIN) if ready else {}, *(without(keys, OWN) for keys in (config.base, own))]
    merged: Any = OmegaConf.to_container(OmegaConf.merge(*map(literal, parts)), resolve=True)
    values = {"model": {}, "data": {}, **without(merged, SET)}
    for key in ("model", "data"):
        if not isinstance(values[key], dict):
            raise ValueError(f"{key} of arm {name} is {strict.short(values[key])}; it must be keys and values")
    model = values["model"]
    upcycle = model.get("upcycle")
    if isinstance(upcycle, str) and upcycle:  # a ready config: its keys instead of its name, because a seed joins them
        model["upcycle"] = keys_of(upcycle, UPCYCLE)
    begins = model.get("upcycle") or model
    if not (begins.get("source") or begins.get("donors")):
        raise ValueError(
            f"arm {name} begins with no model; write source=FOLDER where the config says ${{source}}, or "
            f"arms.{name}.model.source=FOLDER"
        )
    return Arm(name, values, match, of)


def check_keys(where: str, keys: Any) -> None:
    """Raise a ValueError unless these are keys and values, none of which a trial sets."""
    if not isinstance(keys, Mapping):
        raise ValueError(f"{where} is {keys!r}; it must be training keys and values")
    for key in SET:
        if found(keys, key) is not None:
            raise ValueError(f"{where}.{key} is set; the study sets it for each run: leave it out, see seeds")


def without(keys: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def trials(plan: Plan, lengths: Mapping[str, int]) -> list[Trial]:
    """List the trials seed by seed, so that a study that is cut short has whole seeds."""
    return [plan.trial(arm, seed, steps=lengths[arm]) for seed in plan.config.seeds for arm in plan.arms]


def tokens_of_step(config: TrainConfig) -> int:
    return config.batch * config.data.sequence


# ---- keys


def found(values: Any, key: str) -> Any:
    """Return a dotted key's value in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Name the first key that differs and changes what is learned; "" if none does."""
    ours, theirs = flat(without(a, QUIET)), flat(without(b, QUIET))
    return next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), "")
