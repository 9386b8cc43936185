"""Define what a training run is told: frozen dataclasses, a part each, that are read once.

The keys and defaults of the other parts stand next to the code that uses them (data/mixture.py, optim/schedule.py ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from training.config.checks import DTYPE, check_run
from training.config.resume import ResumeConfig
from training.data.mixture import DataConfig
from training.islands.config import IslandsConfig
from training.model.lora import LoraConfig
from training.model.recompute import MODES
from training.optim.balance import BalanceConfig
from training.optim.config import OptimConfig
from training.optim.schedule import ScheduleConfig
from training.optim.teacher import TeacherConfig
from training.parallel.mesh import MeshConfig
from upcycle.config.reading import build
from upcycle.config.values import Rule, above_zero, at_least, check_values, one_of
from upcycle.io.strict import short

T = TypeVar("T")
STAGED = ("data", "schedule", "optim", "balance", "teacher")  # parts of a config that a stage may change


EPOCH = "steps; an epoch has as many steps as the data has tokens / (batch * data.sequence)"
OTHER_TOOLS = {  # what other trainers call a key of TrainConfig
    **dict.fromkeys(("lr", "learning_rate"), "schedule.peak"),
    **dict.fromkeys(("warmup", "warmup_steps"), "schedule.warmup"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "schedule.shape"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size"), "micro_batch"),
    "gradient_accumulation_steps": "batch, the sequences of a step on all GPUs, and micro_batch, those at a time",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), EPOCH),
    "tokens": "steps; a step reads batch * data.sequence tokens",
    **dict.fromkeys(("bf16", "fp16", "precision", "mixed_precision"), "model.dtype=bfloat16, the default on a GPU"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "model.recompute=full"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_len"), "data.sequence"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "optim.clip"),
    **dict.fromkeys(("save_steps", "save_every"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "eval_every"), "valid_every"),
    "logging_steps": "log_every",
    "report_to": "log.wandb=PROJECT or log.tensorboard=true",
    **dict.fromkeys(("model_name_or_path", "source"), "model.source or model.upcycle.source"),
    **dict.fromkeys(("dataset", "train"), "data.train"),
    **{name: f"model.upcycle.{name}" for name in ("experts", "granularity", "top_k", "target", "method", "router")},
}


@dataclass(frozen=True)
class ModelConfig:
    ELSEWHERE: ClassVar = {"experts": "model.expert_backend", "compute": "model.dtype"}

    source: str = ""  # a checkpoint folder or hub id, dense or MoE; with `upcycle` it is left empty
    upcycle: Any = ""  # an upcycle config (file, ready name, or keys and values): the MoE is made as it is loaded
    random: bool = False  # random weights in the source's shape
    expert_backend: str = "grouped"  # a backend, a file of training/experts (experts is a count)
    # dtype of activations: bfloat16 | float32 | float64; "": bfloat16 on a GPU, float32 on a CPU, which is slow in the
    # other; a run that goes on keeps its own. Weights, moments and sums of gradients are float32
    dtype: str = ""
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

    def __post_init__(self) -> None:
        frozen = Rule(lambda value: value in ("", "bfloat16", "float32"), "it must be bfloat16 or float32, or left out")
        check_values(self, "model.", {"dtype": DTYPE, "recompute": one_of(MODES), "frozen": frozen})

    def computes(self, device: str = "cuda") -> str:
        """Return the dtype of activations on a kind of device; plans are made for GPUs."""
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps between checkpoints; 0: only at the end
    keep: int = 2  # how many of the newest stay
    keep_every: int = 0  # those whose step is a multiple of this stay too; 0: none
    asynchronous: bool = True  # written while the run goes on

    def __post_init__(self) -> None:
        check_values(self, "checkpoint.", {"every keep_every": at_least(0), "keep": at_least(1)})


@dataclass(frozen=True)
class LogConfig:
    """Say where figures go, besides metrics.jsonl, which is always written."""

    tensorboard: bool = False  # events for TensorBoard, in the run's folder
    wandb: str = ""  # the project that wandb logs to; "": it does not


@dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps between evaluations, besides those before the first and after the last; 0: none
    suite: str = "tiny"  # a file of evaluation/suites, or one of your own
    data: str = ""  # a folder with the suite's files; "": from the hub
    texts: tuple[str, ...] = ()  # suite perplexity: .txt, .jsonl or .jsonl.zst
    fewshot: int | None = None  # examples in a prompt, where the task leaves it open
    limit: int = 0  # items of each task; 0: all
    tokenizer: str = ""  # a folder with one, or a hub id; "": the checkpoint's

    def __post_init__(self) -> None:
        check_values(self, "eval.", {"every limit fewshot": at_least(0)})


@dataclass(frozen=True)
class StageConfig:
    """Describe some steps of a run: the keys here differ from the run's."""

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

    def length(self, config: TrainConfig) -> int:
        """Return how many steps the stage takes in a run of this config."""
        if self.steps:
            return self.steps
        sequence = merged(config.data, self.data, "data.").sequence
        return -(-self.tokens // ((self.batch or config.batch) * sequence))


@dataclass(frozen=True)
class TrainConfig:
    ELSEWHERE: ClassVar = OTHER_TOOLS

    output: str = ""  # the run's folder: checkpoints, metrics.jsonl, run.json, plots.png
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
        rules = {
            "steps batch micro_batch log_every": at_least(1),
            "valid_every": at_least(0),
            "patience": above_zero("it must be a number of minutes above 0"),
            "device": Rule(lambda value: not value or value.startswith(("cpu", "cuda")), "it must be cuda or cpu"),
        }
        check_values(self, "", rules)
        check_run(self)
        if self.stages:
            object.__setattr__(self, "stages", tuple(stage_config(value, i) for i, value in enumerate(self.stages)))
            total = 0
            for number, stage in enumerate(self.stages):
                with of_stage(number):
                    total += stage.length(self)
            if self.steps not in (TrainConfig.steps, total):
                raise ValueError(f"steps is {self.steps}, and the stages have {total}; leave steps out")
            object.__setattr__(self, "steps", total)


def stage_config(value: Any, number: int) -> StageConfig:
    """Return a stage's own keys, read from plain values."""
    if isinstance(value, StageConfig):
        return value
    known = {each.name for each in fields(StageConfig)}
    for key in value if isinstance(value, Mapping) else ():
        if key not in known and key in {each.name for each in fields(TrainConfig)}:
            raise ValueError(
                f"stages.{number}.{key} cannot differ between the stages of a run, because what it says is made once; "
                f"a stage has {', '.join(sorted(known))}"
            )
    with of_stage(number):
        return build(StageConfig, value, "")


def merged(part: T, keys: Mapping[str, Any], where: str) -> T:
    """Return a part of a config with some keys changed."""
    return build(type(part), {**asdict(part), **keys}, where) if keys else part  # type: ignore[call-overload]


@contextmanager
def of_stage(number: int) -> Iterator[None]:
    """Name the stage in each ValueError that is raised within."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"stages.{number}: {error}") from None
