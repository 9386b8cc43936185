"""Define the config of a training run: one frozen dataclass for each part.

Other parts define their keys next to the code that uses them (data/mixture.py, optim/schedule.py ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from training.config.checks import DTYPE, check_run
from training.config.resume import ResumeConfig
from training.data.mixture import DataConfig
from training.experts import AUTO
from training.islands.config import IslandsConfig
from training.model.lora import LoraConfig
from training.model.nf4 import NF4
from training.model.recompute import MODES
from training.observe.trackers import JSONL, TRACKERS
from training.optim.balance import BalanceConfig
from training.optim.config import OptimConfig
from training.optim.schedule import ScheduleConfig
from training.optim.teacher import TeacherConfig
from training.parallel.mesh import MeshConfig
from upcycle.config.reading import build
from upcycle.config.values import BATCH, MINUTES, TOKENS, Rule, above_zero, at_least, check_values, one_of, seed
from upcycle.io.remote import is_url
from upcycle.io.strict import short
from upcycle.plugin import nearest

T = TypeVar("T")
STAGED = ("data", "schedule", "optim", "balance", "teacher")  # parts of a config that a stage may change


LAST = ("all", "weights")
EPOCH = "steps; an epoch has as many steps as the data has tokens / (batch * data.sequence)"
FROZEN = "model.frozen=nf4 with lora.rank=16, for frozen experts of 4 bits, or model.frozen=bfloat16"
OTHER_TOOLS = {  # names of other trainers for keys of TrainConfig
    **dict.fromkeys(("lr", "learning_rate"), "schedule.peak"),
    **dict.fromkeys(("warmup", "warmup_steps"), "schedule.warmup"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "schedule.shape"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"), "micro_batch"),
    "gradient_accumulation_steps": "batch, the sequences of a step on all GPUs, and micro_batch, those at a time",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), EPOCH),
    "tokens": "steps; a step reads batch * data.sequence tokens",
    **dict.fromkeys(("bf16", "fp16", "precision", "mixed_precision"), "model.dtype=bfloat16, the default on a GPU"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "model.recompute=full"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_len", "seq_length", "sequence_len"), "data.sequence"),
    **dict.fromkeys(("lora_r", "lora_rank", "adapter", "peft", "use_peft"), "lora.rank, as in lora.rank=16"),
    "lora_alpha": "lora.alpha",
    **dict.fromkeys(("lora_target_modules", "target_modules"), "lora.match, as in lora.match=[attention,ffn]"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), FROZEN),
    **dict.fromkeys(("optimizer", "optimiser"), "optim.name"),
    "warmup_ratio": "schedule.warmup, in steps",
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("flash_attention", "attn_implementation"), "nothing; attention is fused where the device can"),
    **dict.fromkeys(("deepspeed", "fsdp"), "mesh, as in mesh.ep=8; FSDP divides the rest over all GPUs"),
    "resume_from_checkpoint": "nothing; the same command with the same output resumes",
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "optim.clip"),
    **dict.fromkeys(("save_steps", "save_every"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "eval_every"), "valid_every"),
    "logging_steps": "log_every",
    "report_to": "log.to, as in log.to=[wandb]",
    **dict.fromkeys(("max_steps", "max_iters"), "steps"),
    "output_dir": "output",
    **dict.fromkeys(("model_name_or_path", "base_model", "source"), "model.source or model.upcycle.source"),
    **dict.fromkeys(("dataset", "datasets", "train"), "data.train, folders that upcycle prepare made"),
    **{name: f"model.upcycle.{name}" for name in ("experts", "granularity", "top_k", "target", "method", "router")},
}


@dataclass(frozen=True)
class ModelConfig:
    ELSEWHERE: ClassVar = {"experts": "model.expert_backend", "compute": "model.dtype"}

    source: str = ""  # a checkpoint folder, address or Hub id, dense or MoE; empty with `upcycle`
    upcycle: Any = ""  # an upcycle config (file, ready name, or keys and values): the MoE is made while it loads
    random: bool = False  # start from random weights in the source's shape
    # the expert kernels: a file of training/experts | auto: the fastest that is installed and computes this model; a
    # resumed run keeps its own
    expert_backend: str = AUTO
    # dtype of activations: bfloat16 | float32 | float64; "": bfloat16 on a GPU, float32 on a CPU, where bfloat16 is
    # slow; a resumed run keeps its own. Weights, moments and sums of gradients are float32
    dtype: str = ""
    # what backward computes again instead of keeping it: none | selective | attention | experts | full (performance.md)
    recompute: str = "none"
    # dtype of weights that never learn (with adapters, or in groups of rate 0): bfloat16 | float32; "": bfloat16 if the
    # checkpoint and the activations are bfloat16, which gives the same numbers in half of the bytes; nf4: 4 bits
    # for routed experts, with adapters on one GPU
    frozen: str = ""
    compile: bool = False  # torch.compile each layer
    # record the step as a CUDA graph and replay it without the host; only for a single GPU. null: if it is possible
    graph: bool | None = None
    transformer_engine: tuple[str, ...] = ()  # parts of a layer that it computes: attention, linear | linear_fp8, norm

    def __post_init__(self) -> None:
        known = "bfloat16", "float32", NF4
        frozen = Rule(lambda value: value in ("", *known), f"it must be one of {', '.join(known)}, or left out")
        check_values(self, "model.", {"dtype": DTYPE, "recompute": one_of(MODES), "frozen": frozen})

    def computes(self, device: str = "cuda") -> str:
        """Return the dtype of activations on a kind of device; plans assume GPUs."""
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps between checkpoints; 0: only at the end
    keep: int = 2  # newest checkpoints to keep
    keep_every: int = 0  # also keep checkpoints whose step is a multiple of this; 0: none
    # content of the checkpoint after the last step: all | weights, a third of it; more steps then start without moments
    last: str = "all"
    asynchronous: bool = True  # write checkpoints while the run continues
    mirror: str = ""  # address (s3://bucket/run) of a copy of the checkpoints; a run on an empty disk resumes there

    def __post_init__(self) -> None:
        check_values(self, "checkpoint.", {"every keep_every": at_least(0), "keep": at_least(1), "last": one_of(LAST)})
        if self.mirror and not is_url(self.mirror):
            raise ValueError(
                f"checkpoint.mirror is {short(self.mirror)}; it must be an address, such as s3://bucket/run"
            )


@dataclass(frozen=True)
class LogConfig:
    """Say where metrics go, and under which names."""

    ELSEWHERE: ClassVar = {"tensorboard": "log.to=[tensorboard]", "wandb": "log.to=[wandb] log.project=PROJECT"}

    to: tuple[str, ...] = (JSONL,)  # tensorboard | wandb | mlflow | trackio; jsonl: metrics.jsonl, always written
    project: str = "upcycle"  # the trackers' project
    name: str = ""  # the run's name in trackers; "": its folder's

    def __post_init__(self) -> None:
        known = [JSONL, *TRACKERS]
        for name in self.to:
            if name not in known:
                raise ValueError(f"log.to names {name!r}{nearest(name, known)}; it takes {', '.join(known)}")
        check_values(self, "log.", {"project": Rule(bool, "it must be a name, such as log.project=upcycle")})


@dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps between evaluations, in addition to the first and the last; 0: never
    suite: str = "tiny"  # a file of evaluation/suites, or your own
    data: str = ""  # a folder with the suite's files; "": from the Hub
    texts: tuple[str, ...] = ()  # for suite perplexity: .txt, .jsonl or .jsonl.zst files
    fewshot: int | None = None  # examples in a prompt, if the task leaves it open
    limit: int = 0  # items of each task; 0: all
    tokenizer: str = ""  # folder or Hub id of a tokenizer; "": the checkpoint's

    def __post_init__(self) -> None:
        check_values(self, "eval.", {"every limit fewshot": at_least(0)})


@dataclass(frozen=True)
class StageConfig:
    """One stage of a run, with the keys that differ from the run's."""

    name: str = ""  # name in messages; "": its number
    steps: int = 0  # optimiser steps
    tokens: int = 0  # instead of steps: the stage takes at least this many tokens
    data: Any = field(default_factory=dict)  # keys of data that differ in this stage, such as mixture and sequence
    schedule: Any = field(default_factory=dict)  # keys of schedule, which counts from the stage's first step
    optim: Any = field(default_factory=dict)  # keys of optim, for example groups that are frozen in this stage
    balance: Any = field(default_factory=dict)  # keys of balance
    teacher: Any = field(default_factory=dict)  # keys of teacher; its weight changes linearly through the stage
    batch: int = 0  # sequences a step; 0: the run's
    micro_batch: int = 0  # sequences at a time, on each data-parallel rank; 0: the run's
    valid_every: int | None = None  # steps between validations; null: the run's

    def __post_init__(self) -> None:
        rules = {"steps valid_every": at_least(0), "tokens": at_least(0, most=TOKENS)}
        check_values(self, "", rules | {"batch micro_batch": at_least(0, most=BATCH)})
        if (self.steps > 0) == (self.tokens > 0):
            raise ValueError(
                f"steps is {self.steps} and tokens is {self.tokens}; set exactly one of them, for instance steps=200"
            )
        for name in STAGED:
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} is {short(getattr(self, name))}; it must be keys and values")

    def length(self, config: TrainConfig) -> int:
        """Return the number of steps of the stage in a run of this config."""
        if self.steps:
            return self.steps
        sequence = merged(config.data, self.data, "data.").sequence
        return -(-self.tokens // ((self.batch or config.batch) * sequence))


@dataclass(frozen=True)
class TrainConfig:
    ELSEWHERE: ClassVar = OTHER_TOOLS
    AUTO: ClassVar = ("micro_batch",)  # keys that may be `auto`, which is read as 0

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
    steps: int = 1000  # optimiser steps in total, also of a resumed run
    # stages one after the other, each with steps or tokens and the keys that differ from the run's; []: one stage
    stages: tuple[Any, ...] = ()
    batch: int = 64  # sequences a step
    micro_batch: int = 1  # sequences at a time, on each data-parallel rank; auto: as many as fit, by `upcycle estimate`
    log_every: int = 10  # steps between lines of metrics.jsonl
    valid_every: int = 0  # steps between validations; 0: only before the first and after the last
    profile: str = ""  # steps to trace, such as 10-12: trace-10-12.json.gz, for perfetto
    memory_snapshot: bool = False  # record CUDA's allocator in memory.pickle, for pytorch.org/memory_viz
    export: str = ""  # folder or address for the final model, in Hugging Face layout
    push: str = ""  # org/name on the Hub, for the export; a new repository is public
    patience: float = 30.0  # minutes that ranks wait for each other before they name the missing one
    device: str = ""  # cuda | cpu; "": cuda if there is one
    seed: int = 0  # seed of random weights (model.random)

    def __post_init__(self) -> None:
        rules = {
            "steps log_every": at_least(1),
            "batch": at_least(1, most=BATCH),
            "micro_batch": at_least(0, most=BATCH),
            "valid_every": at_least(0),
            "patience": above_zero("it must be a number of minutes above 0", most=MINUTES),
            "seed": seed(),
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
                raise ValueError(f"steps is {self.steps}, but the stages have {total}; leave steps out")
            object.__setattr__(self, "steps", total)


def stage_config(value: Any, number: int) -> StageConfig:
    """Read a stage's own keys from plain values."""
    if isinstance(value, StageConfig):
        return value
    known = {each.name for each in fields(StageConfig)}
    for key in value if isinstance(value, Mapping) else ():
        if key not in known and key in {each.name for each in fields(TrainConfig)}:
            raise ValueError(
                f"stages.{number}.{key} cannot differ between stages, because the run sets it up once; "
                f"a stage can have {', '.join(sorted(known))}"
            )
    with of_stage(number):
        return build(StageConfig, value, "")


def merged(part: T, keys: Mapping[str, Any], where: str) -> T:
    """Return a part of a config with some keys changed."""
    return build(type(part), {**asdict(part), **keys}, where) if keys else part  # type: ignore[call-overload]


@contextmanager
def of_stage(number: int) -> Iterator[None]:
    """Prefix each ValueError with the stage."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"stages.{number}: {error}") from None
