"""Record a step as a CUDA graph after a few runs, and replay it from then on without the host.

A small model's step is thousands of kernels, and most finish before the host launches the next one. Replayed, they
follow each other on the device. Values that change from step to step are read from fixed memory: batches, learning
rates (Optimizer.pace), and everything in checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from training.config.schema import TrainConfig
from training.data.batch import Batch
from training.experts import capabilities
from training.run.build import Learner

MOST = 0.5  # share of device memory above which a recorded step, which keeps its memory, makes room for a validation
WARM = 3  # steps before recording, in which kernels compile and libraries allocate
Step = Callable[[Sequence[Batch], float], dict[str, Tensor]]
TrainStep = Callable[[Learner, Sequence[Batch], float | None], dict[str, Tensor]]


def stepping(run: Learner, train_step: TrainStep) -> Step:
    """Return the function that makes a run's steps: recorded, unless something prevents it."""
    asked, reason = run.config.model.graph, obstacle(run)
    if asked and reason:
        raise ValueError(f"model.graph is true, but {reason}; leave it out, or set it to false")
    return partial(train_step, run) if reason or asked is False else Recorded(run, train_step)


def obstacle(run: Learner) -> str:
    """Return why the run's step cannot be recorded, or ""."""
    if run.device.type != "cuda":
        return f"there is no CUDA graph on a {run.device.type.upper()}"
    if run.model.dense.carried is not None:
        return "transformers' own code may ask the device in a step"
    return hindrance(run.config, run.mesh.world, bool(run.model.moe), taught=run.teacher is not None)


def hindrance(config: TrainConfig, world: int, moe: bool, *, taught: bool) -> str:
    """Return which key of a config prevents recording on any device, or "". `moe`: the model has experts; `taught`: the
    loss includes a teacher."""
    model, backend = config.model, config.model.expert_backend
    reasons = {
        f"{world} ranks wait for each other in a step": world > 1,
        "a teacher's share of the loss changes from step to step": taught,
        "islands exchange their weights between steps": config.islands.asked,
        f"model.transformer_engine is {list(model.transformer_engine)}": bool(model.transformer_engine),
        f"model.expert_backend={backend} asks the device in a step": moe and not capabilities(backend).waitless,
        f"experts wait for the device where model.dtype is {model.computes()}": moe and model.computes() != "bfloat16",
    }
    return next((reason for reason, stands in reasons.items() if stands), "")


class Recorded:
    """Run a run's steps, recorded. If recording fails, for lack of memory or because something waits for the device,
    steps run normally, unless model.graph is true."""

    def __init__(self, run: Learner, train_step: TrainStep) -> None:
        self.run, self.train_step, self.warm = run, train_step, WARM
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def __call__(self, batches: Sequence[Batch], lr: float) -> dict[str, Tensor]:
        if self.warm or self.failed:
            self.warm = max(self.warm - 1, 0)
            return self.train_step(self.run, batches, lr)
        if self.graph is None:
            self.record(batches)
            return self(batches, lr)
        assert self.run.optimizer is not None
        self.run.optimizer.pace(lr)
        for own, new in zip(self.batches, batches, strict=True):
            for part in fields(own):
                getattr(own, part.name).copy_(getattr(new, part.name), non_blocking=True)
        with self.run.phases("step"):
            self.graph.replay()
        return self.learned

    def make_room(self) -> None:
        """Give a large step's memory back before something else needs it; the next step is recorded again."""
        if self.graph is not None and torch.cuda.memory_reserved() > MOST * torch.cuda.mem_get_info()[1]:
            self.graph.reset()
            self.graph = None
            self.learned.clear()
            torch.cuda.empty_cache()

    def record(self, batches: Sequence[Batch]) -> None:
        """Record a step on its own memory, without running it."""
        run = self.run
        self.batches = [batch.to(run.device) for batch in batches]
        try:
            graph = torch.cuda.CUDAGraph()
            try:
                # other threads load data and write checkpoints; a failed recording leaves the thread on the stream that
                # it was made on (torch 2.13 too), and so would all later steps, so this one is entered once more around
                # it
                home = torch.cuda.stream(torch.cuda.current_stream())
                with home, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.learned = self.train_step(run, self.batches, None)
            except RuntimeError:
                release_generator(self.batches[0].tokens)
                raise
            self.graph = graph
        except RuntimeError as error:
            if run.config.model.graph:
                raise
            self.failed = True
            assert run.optimizer is not None
            run.optimizer.zero_grad(set_to_none=True)
            run.balance.routed.clear()
            torch.cuda.empty_cache()
            why = str(error).split("\n")[0]
            if isinstance(error, torch.OutOfMemoryError):
                why = f"it needs more memory; try micro_batch={max(1, run.config.micro_batch // 2)}"
            warnings.warn(
                f"the step is not recorded, so the host launches each one, which takes longer: {why}", stacklevel=2
            )


def release_generator(number: Tensor) -> None:
    """Release torch's random generator, which a failed recording leaves waiting for the graph: an empty recording frees
    it. `number`: any tensor of the device; it stays unchanged, and no new memory is needed."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        number.add_(0)
