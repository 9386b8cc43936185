"""Measure training steps with random weights and random tokens: tokens/s, TFLOP/s and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from training.config.checks import DTYPE
from training.config.resume import flat
from training.config.schema import ModelConfig, TrainConfig
from training.data.batch import Batch
from training.data.mixture import Mock
from training.model import nf4
from training.model.decoder import Decoder
from training.model.lora import attach, encode
from training.model.moe import Experts, Routing
from training.observe.flops import model_flops, peak_tflops
from training.observe.phases import phases
from training.optim.slots import freeze
from training.parallel.collectives import all_reduce, box, local
from training.parallel.mesh import ParallelMesh, check
from training.parallel.processes import processes
from training.parallel.shard import trouble
from training.run.build import data_rank, learner
from training.run.parts import hold, room, say, stages_of_rank, with_backend
from training.run.preflight import check_optim
from training.run.record import stepping
from training.run.step import gradients, train_step
from upcycle.arch import registry
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.values import BATCH, MINUTES, above_zero, at_least, check_values, one_of, seed
from upcycle.io import strict
from upcycle.planning import rng

ROUTING = ("natural", "balanced")
BLOCKS = 3  # timed turns of `steps` steps each; the row has their median


@dataclass(frozen=True)
class BenchConfig(TrainConfig):
    """Hold the keys of a bench: the keys of a run, and some of its own."""

    ELSEWHERE: ClassVar = {
        "sequence": "data.sequence", "experts": "model.expert_backend", "compute": "model.dtype",
        "recompute": "model.recompute", "compile": "model.compile", "graph": "model.graph",
        "transformer_engine": "model.transformer_engine", "capacity": "balance.capacity_factor",
        "pad": "balance.pad_to_capacity", "moments": "optim.moments", "groups": "optim.groups",
    }  # fmt: skip

    architecture: Any = None  # a config.json, as keys and values or as a file
    layers: int = 0  # number of layers; 0: as many as the architecture has
    stack: bool = False  # time only the blocks, without head and loss
    documents: int = 0  # mean tokens of a document, which attention does not leave; 0: a sequence is one document
    routing: str = "natural"  # natural | balanced
    weights: str = ""  # dtype of parameters and gradients: bfloat16 | float32; "": float32 on a CPU, bfloat16 on a GPU
    optimizer: bool = False  # also time the optimiser's step
    warmup: int = 5  # steps before the clock starts
    steps: int = 10  # steps in each of the three timed turns
    batch: int = 4  # sequences in a step
    micro_batch: int = 0  # sequences that a data-parallel rank computes at a time; 0: all of its sequences
    phases: bool = False  # also report the time of each phase, from the profiler

    def __post_init__(self) -> None:
        rules = {
            "routing": one_of(ROUTING), "weights": DTYPE, "steps log_every": at_least(1),
            "batch": at_least(1, most=BATCH), "micro_batch": at_least(0, most=BATCH),
            "warmup documents layers valid_every": at_least(0),
            "patience": above_zero("it must be a number of minutes above 0", most=MINUTES), "seed": seed(),
        }  # fmt: skip
        check_values(self, "", rules)

    def run(self, micro_batch: int) -> TrainConfig:
        """Return the config of a training run that takes the same steps with random weights of the architecture."""
        same = {each.name: getattr(self, each.name) for each in fields(TrainConfig)} | {"micro_batch": micro_batch}
        model = replace(self.model, source="architecture", upcycle="", random=True)
        data = replace(self.data, mask_documents=self.documents > 0)
        return TrainConfig(**same | {"model": model, "data": data})


def spec_of(config: BenchConfig) -> DenseSpec | MoESpec:
    source = config.architecture
    keys = strict.read_object(Path(source)) if isinstance(source, str) else source
    if not isinstance(keys, Mapping) or "model_type" not in keys:
        raise ValueError("architecture must be a config.json; write its path, or its keys and values with model_type")
    keys = {**keys, **({"num_hidden_layers": config.layers} if config.layers else {})}
    kind = keys["model_type"]
    return registry.any_of(kind).read(keys)


def bench(config: BenchConfig) -> dict[str, Any]:
    with processes(settings=flat(asdict(config))) as device:
        return measured(config, spec_of(config), device)


def measured(config: BenchConfig, spec: DenseSpec | MoESpec, device: torch.device) -> dict[str, Any]:
    dense = spec.dense if isinstance(spec, MoESpec) else spec
    model = replace(config.model, dtype=config.model.computes(device.type))
    config = replace(config, model=model, weights=config.weights or ModelConfig().computes(device.type))
    check(config.mesh, dist.get_world_size() if dist.is_initialized() else 1, spec, config.data.sequence)
    mesh = ParallelMesh(config.mesh, device_type=device.type)
    size = config.micro_batch or config.batch // mesh.dp
    count = config.batch // (mesh.dp * size) if size else 0
    if count * mesh.dp * size != config.batch or not count:
        raise ValueError(
            f"batch={config.batch} cannot be divided into micro-batches of {size or 1} sequences on {mesh.dp} "
            f"data-parallel ranks; try batch={mesh.dp * (size or 1) * max(count, 1)}"
        )
    training, experts = with_backend(config.run(size), spec, device.type)
    check_optim(training, spec)
    say(experts)
    parts = [build(config, training, spec, mesh, layers, device) for layers in stages_of_rank(spec, mesh)]
    run = learner(training, parts, mesh, device, learns=config.optimizer)
    if config.routing == "balanced":
        for block in run.balance.blocks:
            assert block.balance is not None
            block.balance = partial(in_turn, block.balance)
    batches = [batch(config, dense.vocab, (number * mesh.dp + data_rank(mesh)) * size, size) for number in range(count)]
    batches = [part.pinned() for part in batches] if device.type == "cuda" else batches

    make_step = stepping(run, train_step) if config.optimizer else None

    def step() -> None:
        if make_step is not None:
            make_step(batches, 1e-5)
        else:  # only forward and backward
            gradients(run, batches)
            run.balance.end_step()
            run.model.zero_grad(set_to_none=True)

    for _ in range(config.warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = retries(device)
    seconds = [timed(step, device, config.steps) for _ in range(BLOCKS)]
    if said := trouble(run.parts):
        raise ValueError(said)
    middle = statistics.median(seconds)
    tokens = config.batch * config.data.sequence
    sizes = [n for sample in range(config.batch) for n in documents(config, sample).bincount().tolist()]
    head = 6 * dense.vocab * dense.hidden if config.stack else 0  # a stack has no head
    flops = sum(model_flops(spec, n) * n for n in sizes) / tokens - head
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = peak_tflops(name)
    tflops = flops * tokens / middle / 1e12 / mesh.world
    parameters = torch.tensor(nf4.count(run.model), device=device)
    memory = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0, device=device)
    retried = torch.tensor(retries(device) - before, device=device)
    if mesh.world > 1:
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        dist.all_reduce(retried, dist.ReduceOp.MAX)
    config = replace(config, model=replace(config.model, expert_backend=training.model.expert_backend))
    given, defaults = flat(asdict(replace(config, architecture=None))), flat(asdict(BenchConfig()))
    return {
        "device": name,
        "torch": torch.__version__,
        "config": {key: value for key, value in given.items() if defaults.get(key) != value},
        "model_type": dense.family,
        "parameters": int(all_reduce(parameters, mesh.group("pp"))),
        "gpus": mesh.world,
        "tokens": tokens,
        "seconds": middle,
        "seconds_least_most": [min(seconds), max(seconds)],
        "tokens_per_s": tokens / middle,
        "gflop_per_token": flops / 1e9,
        "tflops": tflops,  # of each GPU
        "mfu": None if peak is None else tflops / peak,
        "peak_gib": float(memory) if device.type == "cuda" else None,  # of the fullest GPU
        "allocation_retries": int(retried),  # above 0: memory was short, which made the steps slower
        "phases_ms": phases(step) if config.phases and device.type == "cuda" else None,
    }


def retries(device: torch.device) -> int:
    """Return how often the allocator freed its whole cache because the device had no memory left."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


class Stack(Decoder):
    """Compute only the blocks; the loss is the mean square of their output."""

    def __init__(self, *inputs: Any, **named: Any) -> None:
        super().__init__(*inputs, **named)
        self.head, self.last = None, False

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        out_BSD: Tensor = self(tokens_BS, positions_BS, documents_BS, None, length)
        return out_BSD.float().square().mean(-1).sum()


def build(
    config: BenchConfig,
    training: TrainConfig,
    spec: DenseSpec | MoESpec,
    mesh: ParallelMesh,
    layers: range,
    device: torch.device,
) -> Decoder:
    kind = Stack if config.stack else Decoder
    with torch.device("meta"):
        model = kind(
            spec, part=layers, experts=training.model.expert_backend, compute=getattr(torch, config.model.dtype)
        )
        attach(model, config.lora)
    freeze(model, training.optim)
    hold(model.to(getattr(torch, config.weights)), model.compute)
    encode(model, training.model.frozen)
    model = room(model, training.model, mesh, device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or tensor.ndim == 1:
                tensor.fill_(0.0 if name.endswith("bias") or model.dense.norm.endswith("1p") else 1.0)
            elif "_codes." not in name:
                draw(name, tensor, device)
        for name, experts in model.named_modules():
            if isinstance(experts, Experts) and experts.up_codes is not None:
                with experts.wide():
                    draw(f"{name}.up", experts.up, device)
                    draw(f"{name}.down", experts.down, device)
    return model.train()


def draw(name: str, tensor: Tensor, device: torch.device) -> None:
    """Fill a tensor with random numbers; ranks that hold copies of the same part draw it from the same seed."""
    seed = rng.generator(0, name, box(tensor)).initial_seed()
    local(tensor).normal_(std=0.02, generator=torch.Generator(device).manual_seed(seed))


def batch(config: BenchConfig, vocab: int, sample: int, size: int) -> Batch:
    made = Mock(vocab, config.data.sequence).batch(sample, size)
    number_BS = torch.stack([documents(config, each) for each in range(sample, sample + size)])
    began_BS = torch.searchsorted(number_BS, number_BS)
    return replace(made, documents=number_BS.int(), positions=made.positions - began_BS)


def documents(config: BenchConfig, sample: int) -> Tensor:
    """Return the number of each token's document; a new document may begin at every token."""
    chance = torch.rand(config.data.sequence, generator=rng.generator(0, "documents", sample))
    begins = chance * config.documents < (1 if config.documents else 0)
    return (begins.cumsum(0) - begins[0].long()).contiguous()


def in_turn(then: Callable[[Routing], Routing], routing: Routing) -> Routing:
    """Send tokens to experts in turn, and pass these choices to a block's balance.

    All experts get equally many rows, and a token's experts are neighbours."""
    count, k = routing.expert_TK.shape
    turn = torch.arange(count * k, device=routing.expert_TK.device) % routing.logits_TN.shape[1]
    return then(routing._replace(expert_TK=turn.view(count, k)))


def timed(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Return the seconds of a step; as in training, the host may run ahead of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def sentence(row: Mapping[str, Any]) -> str:
    """Return a row's results as a sentence."""
    return (
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['tflops']:.4g} TFLOP/s"
        + (f" ({row['mfu']:.1%} of the card's peak)" if row["mfu"] is not None else "")
        + (f", {row['peak_gib']:.1f} GiB" if row["peak_gib"] is not None else "")
        + f", {row['seconds'] * 1e3:.1f} ms a step on {row['device']}"
    )
