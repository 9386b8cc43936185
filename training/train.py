"""A training run, top to bottom: build, loop, done. The loop is the table of contents."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import layout
from training.balance import Balance
from training.config import TrainConfig, upcycle_config
from training.data import Batch, Loader, Samples, Validation, open_training, open_validation
from training.flops import model_flops
from training.layout import Origin
from training.metrics import Metrics
from training.model.decoder import Decoder
from training.model.recompute import recompute
from training.optim import Optimizer, SpikeGuard
from training.profiling import Phases, Trace, memory_snapshot, steps_to_trace
from training.schedule import schedule
from training.state import Checkpoints, Stop, TrainState
from upcycle import disk

# what may change between a run and its resumption without anybody being told: it changes no number
QUIET = (
    "output", "export", "checkpoint", "log", "log_every", "valid_every", "profile", "memory_snapshot", "device",
)  # fmt: skip


def train(config: TrainConfig) -> Path:
    """Run to config.steps, or to a signal; the same call goes on where it stopped. Returns the run's folder."""
    torch.manual_seed(config.seed)  # nothing draws from these two; a module that ever does is still reproducible
    random.seed(config.seed)
    with start(config) as run:
        state, balance, rate = run.state, run.balance, schedule(config.schedule, config.steps)
        with (
            kept_in(run) as checkpoints,
            Stop() as stop,
            Trace(run.folder, steps_to_trace(config.profile)) as trace,
            memory_snapshot(run.folder / "memory.pickle") if config.memory_snapshot else nullcontext(),
        ):
            first = checkpoints.load(state)
            exported = bool(config.export) and Path(config.export).exists()
            if exported and first < config.steps:  # said before the training, not after it
                raise ValueError(f"export={config.export} exists already; remove it or choose another folder")
            samples = run.place.samples = open_training(config.data, run.origin.dense.vocab, run.place.saved)
            valid = open_validation(config.data, run.origin.dense.vocab)
            flops = model_flops(run.origin.spec, config.data.sequence)
            metrics = Metrics(
                run.folder, first, steps=config.steps, flops=flops, config=asdict(config), **asdict(config.log)
            )
            with metrics, Loader(samples, run.place.cursor, config.batch, pin=run.cuda) as loader:
                if first == 0:
                    metrics.log(0, **validate(run, valid))
                stopped = False
                while state.step < config.steps and not stopped:
                    trace.before(state.step + 1)
                    with run.phases("data"):
                        batch, cursor = next(loader)
                    learned = train_step(run, batch, rate(state.step))
                    state.step, run.place.cursor = state.step + 1, cursor
                    metrics.step(state.step, tokens=batch.tokens.numel(), lr=rate(state.step - 1), **learned)
                    stopped = stop.requested()
                    if due(state.step, config.log_every, config.steps) or stopped:
                        metrics.log(state.step, **balance_numbers(balance), **run.phases.fetch(metrics.taken))
                    if due(state.step, config.valid_every, config.steps):
                        metrics.log(state.step, **validate(run, valid))
                    if due(state.step, config.checkpoint.every, config.steps) or stopped:
                        checkpoints.save(state.step, state)
        draw(run.folder)
        if config.export and state.step == config.steps and not exported:
            layout.export(run.model, run.origin, config.export)
    return run.folder


def draw(folder: Path) -> None:
    """plots.png, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from training.plots import plot

        plot([folder], folder / "plots.png")


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


# ---- what a run is made of


@dataclass
class Place:
    """How far the data is read: one integer, and what a stream needs besides (a part of the checkpoint)."""

    cursor: int = 0
    saved: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "samples": self.samples.state(self.cursor) if self.samples else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor, self.saved = state["cursor"], state["samples"]


@dataclass
class Run:
    config: TrainConfig
    folder: Path
    origin: Origin
    model: Decoder
    optimizer: Optimizer
    guard: SpikeGuard
    balance: Balance
    state: TrainState
    place: Place
    phases: Phases
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@contextmanager
def start(config: TrainConfig) -> Iterator[Run]:
    """Model with its weights, optimiser, balance, and the state that a checkpoint holds."""
    if not config.output:
        raise ValueError("output is not set; write output=FOLDER for the run's checkpoints and metrics")
    folder, device = (
        Path(config.output),
        torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu")),
    )
    with source(config) as origin:
        model = Decoder(origin.spec, experts=config.model.experts, compute=getattr(torch, config.model.compute))
        model = layout.initialise(model, config.seed) if config.model.random else layout.load(model, origin)
        model = model.to(device)
        recompute(model, config.model.recompute)
        if config.model.compile:
            model.compile_parts()
        optimizer = Optimizer(config.optim, model.named_parameters())
        guard = SpikeGuard(config.optim, device)
        balance = Balance(config.balance, model, scale=config.micro_batch / config.batch, sequences=config.micro_batch)
        place = Place()
        state = TrainState(model, [optimizer], parts={"guard": guard, "data": place}, rank_parts={"load": balance.load})
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_atomic(folder / "config.json", json.dumps(asdict(config), indent=2, default=str).encode() + b"\n")
        yield Run(config, folder, origin, model, optimizer, guard, balance, state, place, Phases(device), device)


def kept_in(run: Run) -> Checkpoints:
    keep = run.config.checkpoint
    learns = {k: v for k, v in asdict(run.config).items() if k not in QUIET}
    settings = hashlib.sha256(json.dumps(learns, sort_keys=True, default=str).encode()).hexdigest()
    return Checkpoints(
        run.folder / "checkpoints",
        keep=keep.keep,
        keep_every=keep.keep_every,
        asynchronous=keep.asynchronous,
        config=settings,
    )


def source(config: TrainConfig) -> AbstractContextManager[Origin]:
    model = config.model
    return layout.online(upcycle_config(model)) if model.upcycle else layout.opened(model.source)


# ---- one step


def train_step(run: Run, batch: Batch, lr: float) -> dict[str, Tensor]:
    """Forward and backward over the micro-batches, one update. Everything stays on the device."""
    batch = batch.to(run.device)
    scored, nats = batch.scored.sum(), torch.zeros((), device=run.device)
    for part in pieces(batch, run.config.micro_batch):
        with run.phases("forward"):
            loss = nll(run, part)
        with run.phases("backward"):
            (loss / scored).backward()  # type: ignore[no-untyped-call]
        nats += loss.detach()
    with run.phases("optimizer"):
        loss, norm = nats / scored, run.optimizer.clip()
        skip = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if run.config.optim.spike_sigma:
            skip = skip | run.guard.spike(loss, norm)
        run.optimizer.step(lr, skip)
        run.balance.end_step(skip)
        run.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "grad_norm": norm, "skipped": run.optimizer.skipped}


def nll(run: Run, batch: Batch) -> Tensor:
    documents = batch.documents if run.config.data.mask_documents else None
    return run.model.loss(batch.tokens, batch.labels, batch.positions, documents)


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, batch.tokens.shape[0], size):
        yield batch.each(lambda tensor, start=start: tensor[start : start + size])  # type: ignore[misc]


@torch.no_grad()
def validate(run: Run, valid: Sequence[Validation]) -> dict[str, float]:
    """Loss a token and bits per byte of every named set."""
    found: dict[str, float] = {}
    for part in valid:
        nats, tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
        for batch in part.batches(run.config.micro_batch):
            nats += nll(run, batch.to(run.device))
            tokens += int(batch.scored.sum())
        found |= {
            f"valid/{part.name}/loss": float(nats) / tokens,
            f"valid/{part.name}/bpb": part.bits_per_byte(float(nats)),
        }
    return found


def balance_numbers(balance: Balance) -> dict[str, float]:
    """Since the last time: worst and mean over layers, and each layer by itself."""
    layers = balance.load.fetch()
    found: dict[str, float] = {}
    for number, layer in enumerate(layers):
        found |= {f"balance/{number}/max_over_mean": layer.max_over_mean, f"balance/{number}/entropy": layer.entropy}
    if layers:
        found["balance/max_over_mean"] = max(layer.max_over_mean for layer in layers)
        found["balance/dropped"] = sum(layer.dropped for layer in layers) / len(layers)
    return found
