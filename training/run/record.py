"""Run a step a few times, record it as a CUDA graph, and replay it from then on, without its host.

A small model's step is thousands of kernels, most of which are done before the host has asked for the next. Replayed,
they follow each other on the device. What changes from step to step is read from memory that stays where it is: the
batches, the learning rates (Optimizer.pace), and all that a checkpoint holds.
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

MOST = 0.5  # share of the device's memory that a step may take: validation finds none of it free
WARM = 3  # steps that run as they are: kernels are compiled in them, and libraries make room for themselves
Step = Callable[[Sequence[Batch], float], dict[str, Tensor]]
TrainStep = Callable[[Learner, Sequence[Batch], float | None], dict[str, Tensor]]


def stepping(run: Learner, train_step: TrainStep) -> Step:
    """Return what makes a run's steps while its config stays: recorded unless model.graph forbids it or something is in
    the way."""
    asked, reason = run.config.model.graph, obstacle(run)
    if asked and reason:
        raise ValueError(f"model.graph is true, but {reason}; leave it out, or set it to false")
    return partial(train_step, run) if reason or asked is False else Recorded(run, train_step)


def obstacle(run: Learner) -> str:
    """Return why the run's step cannot be recorded; "" if nothing is known to be in the way."""
    if run.device.type != "cuda":
        return f"there is no CUDA graph on a {run.device.type.upper()}"
    if run.model.dense.carried is not None:
        return "transformers' own code may ask the device in a step"
    return hindrance(run.config, run.mesh.world, bool(run.model.moe), taught=run.teacher is not None)


def hindrance(config: TrainConfig, world: int, moe: bool, *, taught: bool) -> str:
    """Return what of a config is in the way of recording, on any device; "" if nothing is. `moe`: whether the model has
    experts; `taught`: whether a teacher's loss is a part of a step's."""
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
    """Take a run's steps. If recording fails, because memory is short or something asks the device, they go on as they
    are, unless model.graph insists."""

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

    def record(self, batches: Sequence[Batch]) -> None:
        """Record a step on memory of its own; nothing of it runs."""
        run = self.run
        self.batches = [batch.to(run.device) for batch in batches]
        try:
            graph = torch.cuda.CUDAGraph()
            taken, total = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
            if not run.config.model.graph and taken > MOST * total:
                raise RuntimeError(
                    f"it keeps its memory to itself, and a step takes {taken / total:.0%} of the device's"
                )
            try:
                # other threads load data and write checkpoints; a recording that fails stays on the stream that it was
                # made on (torch 2.13 too), and so would all later steps, so this one is entered once more around it
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
            warnings.warn(
                f"the step is not recorded, and each goes on by its host, which takes longer: {why}", stacklevel=2
            )


def release_generator(number: Tensor) -> None:
    """Let torch's generator of random numbers draw again: a recording that fails leaves it waiting for the graph, and
    one that ends as it should sets it free. `number`: any of the device; it does not change, since this recording is
    never replayed, and there may be no new memory."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        number.add_(0)
