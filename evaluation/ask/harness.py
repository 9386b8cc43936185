"""Run lm-eval's own command line with our engine as its model `upcycle`; all its tasks, flags and loggers work.

usage: python -m evaluation lm-eval COMMAND ...

  python -m evaluation lm-eval run --model upcycle --model_args pretrained=./moe --tasks arc_easy --num_fewshot 5

COMMAND and its flags are lm-eval's: see `python -m lm_eval run --help`. lm-eval has a fixed table of models and no
plug-ins, so the plain `lm-eval` does not know ours; in Python, `import evaluation.ask.harness` adds it. --model hf and
vllm are lm-eval's own, for models that our decoder cannot run. Several processes divide one model: torchrun
--nproc-per-node 8 -m evaluation lm-eval run --model upcycle --model_args pretrained=./moe,mesh.ep=8 ...

keys of --model_args, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from lm_eval._cli import HarnessCLI
from lm_eval.api.registry import register_model
from lm_eval.utils import setup_logging

from evaluation.ask import load
from evaluation.ask.engine import Engine, Ranks
from evaluation.ask.lm import DecoderLM
from evaluation.ask.remember import Remembered
from training.experts import DEFAULT
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import processes
from upcycle.config.reading import read
from upcycle.config.values import LENGTH, at_least, check_values, one_of

NAME = "upcycle"
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class AskConfig:
    """Hold the keys of our engine that `upcycle eval` and lm-eval's --model_args share."""

    ELSEWHERE: ClassVar = (
        {"experts": "expert_backend"}
        | dict.fromkeys(("tokens", "batch_size"), "forward_tokens")
        | dict.fromkeys(("sequence", "context", "max_seq_length", "seq_len"), "max_length")
    )

    dtype: str = "float32"  # float32 | bfloat16 | float64
    forward_tokens: int = 8192  # tokens of one forward, at most
    max_length: int = 0  # tokens that the model reads, at most; 0: its context
    expert_backend: str = DEFAULT  # an expert backend, by its file in training/experts
    tokenizer: str = ""  # a folder with a tokenizer, or a hub id; "": the checkpoint's own
    device: str = ""  # cuda | cpu; "": cuda if there is one
    mesh: MeshConfig = field(default_factory=MeshConfig)  # how several processes divide the model

    def __post_init__(self) -> None:
        rules = {"forward_tokens": at_least(1), "max_length": at_least(0, most=LENGTH), "dtype": one_of(DTYPES)}
        check_values(self, "", rules)
        if self.mesh.pp > 1:
            raise ValueError(
                f"mesh.pp={self.mesh.pp}: evaluation has no pipeline; divide the model by mesh.ep or mesh.tp"
            )


@dataclass(frozen=True)
class ModelConfig(AskConfig):
    pretrained: str = ""  # a Hugging Face folder, a hub id, or a training run's folder
    max_gen_toks: int = 0  # tokens of a written answer at most; 0: as the task says, or 256
    cache: str = ""  # a folder that keeps the answers of each model; "": keep none
    # lm-eval passes it; our engine ignores it, because `forward_tokens` sets the size of a forward
    batch_size: Any = None
    max_batch_size: Any = None  # the same as batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "", {"max_gen_toks": at_least(0)})


@register_model(NAME)
class UpcycleLM(DecoderLM):
    """Open a checkpoint on our engine with lm-eval's --model_args; torchrun has started the processes."""

    def __init__(self, pretrained: str, *, progress: bool = True, **options: Any) -> None:
        config = read(ModelConfig, "", values=[("pretrained", str(pretrained)), *options.items()])
        if not config.pretrained:
            raise ValueError("pretrained is not set; write --model_args pretrained=FOLDER")
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "WORLD_SIZE names several processes, and no process group is open; start them with python -m "
                "evaluation lm-eval ..., "
                "or unset WORLD_SIZE"
            )
        check_ranks(config.mesh, dist.get_world_size() if dist.is_initialized() else 1)
        with ExitStack() as stack:
            device = stack.enter_context(processes(kind_of(config.device)))  # open already, if there are several
            self.mesh = ParallelMesh(config.mesh, device_type=device.type)
            loaded = load.opened(
                config.pretrained, config.dtype, self.mesh, device, expert_backend=config.expert_backend,
                tokenizer=config.tokenizer,
            )  # fmt: skip
        engine = Engine(
            loaded.model, config.forward_tokens, ranks_of(self.mesh), self.mesh.group("tp"),
            progress=progress and self.mesh.rank == 0,
        )  # fmt: skip
        super().__init__(
            engine, loaded.tokenizer, stops=loaded.stops, generate=config.max_gen_toks, max_length=config.max_length
        )
        self.about, self.config = loaded.about, config
        if config.cache:
            self.remember(config.cache)

    def remember(self, folder: str | Path) -> None:
        """Keep answers in `folder`, and use the answers that this model has there already."""
        self.remembered = Remembered(folder, self.about.identity, self.mesh.rank)
        self.engine.ranks.any(False)  # all ranks read the cache before one writes to it

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts about the model that lm-eval writes into its results (`config`)."""
        return load.described(self.about)


def check_ranks(mesh: MeshConfig, ranks: int) -> None:
    for axes in (("tp", "cp", "pp", "dp_replicate"), ("ep", "etp", "pp")):
        size = math.prod(getattr(mesh, axis) for axis in axes)
        if ranks % size:
            words = " ".join(f"mesh.{axis}={getattr(mesh, axis)}" for axis in axes if getattr(mesh, axis) > 1)
            raise ValueError(
                f"{words} needs a multiple of {size} processes, and there {'is' if ranks == 1 else 'are'} {ranks}; "
                f"start it with upcycle eval ... nproc={size}"
            )


def ranks_of(mesh: ParallelMesh) -> Ranks:
    """Return the share of this rank: neighbouring tensor-parallel ranks ask the same items, all others ask different
    ones."""
    return Ranks(mesh.rank // mesh.size("tp"), mesh.world // mesh.size("tp"))


def main(words: Sequence[str]) -> int:
    setup_logging()
    command = HarnessCLI()
    with patch.object(sys, "argv", ["lm-eval", *words]):  # lm-eval's parser reads the words from here
        options = command.parse_args()
    with ExitStack() as stack:
        if getattr(options, "model", None) == NAME:
            stack.enter_context(processes(device_of(options)))
        command.execute(options)
    return 0


def device_of(options: Any) -> str:
    return kind_of(getattr(options, "device", None) or (getattr(options, "model_args", None) or {}).get("device"))


def kind_of(device: Any) -> str:
    """Return the device that lm-eval names: cuda:0 by default, or the CPU if there is no GPU.

    Of several processes, each has the device of its rank.
    """
    kind = str(device or "").partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return ""
    return kind if int(os.environ.get("WORLD_SIZE", "1")) > 1 else str(device or "")
