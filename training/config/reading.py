"""What a training run is: one YAML file and key=value words, read once into frozen dataclasses.

Each part's keys, defaults and checks stand beside the code that uses them (data/mixture.py, optim.py, schedule.py ...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from training.data.mixture import DataConfig
from training.islands.config import IslandsConfig
from training.model import transformer_engine
from training.model.lora import LoraConfig
from training.model.recompute import MODES
from training.observe.profiling import steps_to_trace
from training.optim.balance import BalanceConfig
from training.optim.optimizer import OptimConfig
from training.optim.schedule import ScheduleConfig
from training.optim.teacher import TeacherConfig
from training.parallel.mesh import MeshConfig
from training.run.resume import ResumeConfig, flat
from training.run.suite import EvalConfig
from upcycle.config.reading import build, read
from upcycle.config.ready import TRAIN
from upcycle.config.schema import UpcycleConfig
from upcycle.io.strict import short

ADAPTED = ("grouped", "reference")  # backends of experts that compute adapters
COMPUTE = ("bfloat16", "float32", "float64")
STAGED = ("data", "schedule", "optim", "balance", "teacher")  # parts of a config that a stage may change
ALONG = (  # keys in them that are of the whole run: checkpoint and memory are made for one value
    "data.stream", "data.tokenizer", "data.seed", "optim.name", "optim.moments", "optim.spike_window", "teacher.source",
)  # fmt: skip
AT_THE_END = ("average", "shrink")  # of optim: what a run's last step does


@dataclass(frozen=True)
class ModelConfig:
    source: str = ""  # a checkpoint folder or hub id, dense or MoE; with `upcycle` it is left empty
    upcycle: Any = ""  # an upcycle config (file, ready name, or keys and values): the MoE is made as it is loaded
    random: bool = False  # random weights in the source's shape
    expert_backend: str = "grouped"  # a backend, a file of training/experts (experts is a count)
    # dtype of activations: bfloat16 | float32 | float64; weights, moments and sums of gradients are float32
    dtype: str = "bfloat16"
    # what is computed again in backward, instead of kept: none | selective | attention | experts | full (training.md)
    recompute: str = "none"
    # dtype that weights are held in which never learn (beside adapters, in groups of rate 0): bfloat16 | float32; "":
    # bfloat16 where the checkpoint is and the model computes in it, which is the same numbers in half of the bytes
    frozen: str = ""
    compile: bool = False  # torch.compile each layer
    # record a step as a CUDA graph and replay it, so that no host is waited for; on one GPU that trains alone. None
    # given: where nothing is in the way and a step takes at most half of the memory
    graph: bool | None = None
    transformer_engine: tuple[str, ...] = ()  # what of a layer it computes: attention, linear | linear_fp8, norm


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps between checkpoints; 0: only at the end
    keep: int = 2  # how many of the newest stay
    keep_every: int = 0  # those whose step is a multiple of this stay too; 0: none
    asynchronous: bool = True  # written while the run goes on

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("keep", 1), ("keep_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"checkpoint.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class LogConfig:
    """Beside metrics.jsonl, which is always written."""

    tensorboard: bool = False  # events for TensorBoard, in the run's folder
    wandb: str = ""  # the project that wandb logs to; "": it does not


@dataclass(frozen=True)
class StageConfig:
    """Steps of a run with other settings: those of the run, but for the keys that are here."""

    name: str = ""  # in what the run says; "": its number
    steps: int = 0  # of the optimiser
    tokens: int = 0  # in place of steps: as many steps as take at least so many
    data: Any = field(default_factory=dict)  # keys of data that are others in this stage, its mixture and sequence, say
    schedule: Any = field(default_factory=dict)  # keys of schedule; it counts from the stage's first step
    optim: Any = field(default_factory=dict)  # keys of optim, groups among them: what is frozen in this stage, say
    balance: Any = field(default_factory=dict)  # keys of balance
    teacher: Any = field(default_factory=dict)  # keys of teacher; its weight goes in a line through the stage
    batch: int = 0  # sequences a step; 0: the run's
    micro_batch: int = 0  # sequences at a time, on each data-parallel rank; 0: the run's
    valid_every: int | None = None  # steps between validations; none given: the run's

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.tokens > 0) or min(self.steps, self.tokens, self.batch, self.micro_batch) < 0:
            raise ValueError(
                f"steps is {self.steps} and tokens is {self.tokens}; one of them says how long the stage is, for "
                "instance steps=200"
            )
        for name in STAGED:
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} is {short(getattr(self, name))}; it must be keys and values")


@dataclass(frozen=True)
class Stage:
    """Some of a run's steps, and the config that holds in them: `config.steps` of them, after the `first` ones."""

    number: int  # from 1
    name: str
    first: int
    config: TrainConfig

    @property
    def last(self) -> int:
        return self.first + self.config.steps


@dataclass(frozen=True)
class TrainConfig:
    ELSEWHERE: ClassVar = {"lr": "schedule.peak", "learning_rate": "schedule.peak", "warmup": "schedule.warmup"}

    output: str = ""  # the run's folder: checkpoints, metrics.jsonl, config.json, plots.png
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    steps: int = 1000  # of the optimiser, from the first on; a resumed run goes on to the same number
    # one after the other, each so many steps (or tokens) and the keys that differ from the run's; none: all steps alike
    stages: tuple[Any, ...] = ()
    batch: int = 64  # sequences a step
    micro_batch: int = 1  # sequences at a time, on each data-parallel rank
    log_every: int = 10  # steps between lines of metrics.jsonl
    valid_every: int = 0  # steps between validations; 0: only before the first and after the last
    profile: str = ""  # steps to trace, such as 10-12: trace-10-12.json.gz, for perfetto
    memory_snapshot: bool = False  # records CUDA's allocator: memory.pickle, for pytorch.org/memory_viz
    export: str = ""  # a folder for the final model in its Hugging Face layout
    patience: float = 30.0  # minutes that ranks wait for each other before they end and name who is missing
    device: str = ""  # cuda | cpu; "": cuda if there is one
    seed: int = 0  # of random weights (model.random)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not (math.isfinite(self.patience) and self.patience > 0):
            raise ValueError(f"patience is {self.patience}; it must be a number of minutes above 0")
        if self.valid_every < 0:
            raise ValueError(f"valid_every is {self.valid_every}; it must be at least 0")
        if self.batch % self.micro_batch:
            near = max(n for n in range(1, self.micro_batch + 1) if self.batch % n == 0)
            raise ValueError(f"micro_batch={self.micro_batch} must divide batch={self.batch}; try micro_batch={near}")
        if not self.device.startswith(("cpu", "cuda")) and self.device:
            raise ValueError(f"device is {self.device!r}; it must be cuda or cpu")
        if self.eval.every and self.mesh.pp > 1:
            raise ValueError(
                f"eval.every={self.eval.every} does not go with mesh.pp={self.mesh.pp}, because a pipeline is not "
                "evaluated while it trains; write eval.every=0"
            )
        if self.teacher.asked and self.mesh.pp > 1:
            raise ValueError(
                f"teacher.weight={self.teacher.weight:g} does not go with mesh.pp={self.mesh.pp}, because a teacher is "
                "not cut into stages; write mesh.pp=1 or teacher.weight=0"
            )
        if self.islands.asked and self.optim.average:
            raise ValueError(
                f"optim.average={self.optim.average:g} does not go with islands.join, whose exchanges are a mean; "
                "leave it out"
            )
        if self.islands.asked and self.stages:
            raise ValueError(
                "stages do not go with islands.join, whose server knows one run of equal steps; leave them out"
            )
        if self.islands.asked and self.data.stream:
            raise ValueError(
                f"data.stream={self.data.stream} does not go with islands.join, because all islands would read the "
                "same; prepare it with training.cli.prepare"
            )
        if self.lora.rank and self.model.expert_backend not in ADAPTED:
            raise ValueError(
                f"lora.rank={self.lora.rank} does not go with model.expert_backend={self.model.expert_backend}, which "
                f"has no adapters; write model.expert_backend={ADAPTED[0]}"
            )
        steps_to_trace(self.profile)
        if self.model.dtype not in COMPUTE:
            raise ValueError(f"model.dtype is {self.model.dtype!r}; it must be one of {', '.join(COMPUTE)}")
        if self.model.recompute not in MODES:
            raise ValueError(f"model.recompute is {self.model.recompute!r}; it must be one of {', '.join(MODES)}")
        if self.model.frozen not in ("", "bfloat16", "float32"):
            raise ValueError(f"model.frozen is {self.model.frozen!r}; it must be bfloat16 or float32, or left out")
        transformer_engine.known(self.model.transformer_engine)
        if "attention" in self.model.transformer_engine and (self.data.mask_documents or self.mesh.pp > 1):
            got = f"mesh.pp={self.mesh.pp}" if self.mesh.pp > 1 else "data.mask_documents=true"
            raise ValueError(
                f"Transformer Engine's attention does not go with {got}; leave attention out of "
                "model.transformer_engine or change that"
            )
        if bool(self.model.source) == bool(self.model.upcycle):
            raise ValueError(
                "the model comes from model.source (a checkpoint) or model.upcycle (a dense one, upcycled as it is "
                f"read); {'both are' if self.model.source else 'neither is'} set"
            )
        if self.stages:
            object.__setattr__(self, "stages", tuple(stage_config(value, i) for i, value in enumerate(self.stages)))
            total = stages_of(self)[-1].last
            if self.steps not in (TrainConfig.steps, total):
                raise ValueError(f"steps is {self.steps}, and the stages have {total}; leave steps out")
            object.__setattr__(self, "steps", total)


def read_config(file: str, words: Sequence[str] = ()) -> TrainConfig:
    return read(TrainConfig, file, words, TRAIN)


def stage_config(value: Any, number: int) -> StageConfig:
    where = f"stages.{number}."
    if isinstance(value, StageConfig):
        return value
    known = {each.name for each in fields(StageConfig)}
    for key in value if isinstance(value, Mapping) else ():
        if key not in known and key in {each.name for each in fields(TrainConfig)}:
            raise ValueError(
                f"{where}{key} cannot differ between the stages of a run, because what it says is made once; a stage "
                f"has {', '.join(sorted(known))}"
            )
    with of_stage(number):
        return build(StageConfig, value, "")


@contextmanager
def of_stage(number: int) -> Iterator[None]:
    """Context that says of which stage a ValueError is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"stages.{number}: {error}") from None


def stages_of(config: TrainConfig) -> tuple[Stage, ...]:
    """A run's stages, each with its whole config; of one without any, that is one stage."""
    if not config.stages:
        return (Stage(1, "", 0, config),)
    found, first = list[Stage](), 0
    for number, own in enumerate(config.stages):
        with of_stage(number):
            stage = settled(config, own)
        found.append(Stage(number + 1, own.name or f"stage {number + 1}", first, stage))
        first = found[-1].last
        ends = [f"optim.{key}" for key in AT_THE_END if own.optim.get(key) and own is not config.stages[-1]]
        if ends:
            raise ValueError(f"stages.{number} has {ends[0]}, which is of a run's end; write it in the last stage")
    check_sources(found)
    return tuple(found)


def settled(config: TrainConfig, own: StageConfig) -> TrainConfig:
    """The run's config with a stage's keys in it."""
    given = {name: getattr(own, name) for name in STAGED if getattr(own, name)}
    parts = {
        name: build(type(part), {**asdict(part), **keys}, f"{name}.")
        for name, keys in given.items()
        for part in (getattr(config, name),)
    }
    numbers = {name: getattr(own, name) for name in ("batch", "micro_batch") if getattr(own, name)}
    numbers |= {} if own.valid_every is None else {"valid_every": own.valid_every}
    stage = replace(config, stages=(), steps=max(own.steps, 1), **parts, **numbers)
    for key in ALONG:
        part, _, name = key.partition(".")
        ours, runs = (getattr(getattr(each, part), name) for each in (stage, config))
        if ours != runs:
            raise ValueError(
                f"{key} is {ours!r} and the run's is {runs!r}; it is of the whole run, so leave it out here"
            )
    if config.data.stream and replace(stage.data, valid=()) != replace(config.data, valid=()):
        raise ValueError(
            "data differs from the run's, and a stream only goes on as it is; prepare it, and use data.train"
        )
    return replace(stage, steps=own.steps or -(-own.tokens // (stage.batch * stage.data.sequence)))


def check_sources(stages: Sequence[Stage]) -> None:
    """Raises a ValueError where a source's name, by which it is known how far it is read, is of two folders."""
    paths: dict[str, str] = {}
    for stage in stages:
        for source in stage.config.data.train:
            if paths.setdefault(source.name, source.path) != source.path:
                raise ValueError(
                    f"stages.{stage.number - 1}.data.train has {source.name} in {source.path}, which in an earlier "
                    f"stage is {paths[source.name]}; give one of them another name"
                )


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """The stage that made this step; of step 0 the first, and of one that lies behind the run's end the last."""
    return next((stage for stage in stages if step <= stage.last), stages[-1])


def tokens_by(stages: Sequence[Stage], step: int) -> int:
    """How many tokens the first steps of a run take."""
    made = ((max(min(step, stage.last) - stage.first, 0), stage.config) for stage in stages)
    return sum(steps * config.batch * config.data.sequence for steps, config in made)


def upcycle_config(model: ModelConfig) -> UpcycleConfig:
    """`model.upcycle` as the converter's own config."""
    if isinstance(model.upcycle, str):
        return read(UpcycleConfig, model.upcycle)
    return build(UpcycleConfig, model.upcycle, "model.upcycle.")


def settings(config: TrainConfig) -> dict[str, Any]:
    """What all ranks of a run must have in common, by key: all but each one's device. The upcycle config is there with
    its contents, because a file of one name may be another one on another node."""
    found = asdict(config)
    del found["device"]
    if config.model.upcycle:
        with suppress(ValueError, OSError):  # who needs a file that is not there says so; a run that resumes does not
            found["model"]["upcycle"] = asdict(upcycle_config(config.model))
    return flat(found)
