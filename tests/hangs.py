"""Hang one rank of a run in each phase: do the other ranks name it?

    python -m tests.hangs                      every mesh, phase and rank
    python -m tests.hangs --each 4 --seed 7    four of each mesh, drawn by the seed

A run trains on two to four gloo processes. One rank stops in one phase, as a broken disk or driver would stop it. Its
run's patience is some seconds, so the run ends with a sentence. The sentence is right if it names that rank alone.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parallel.ranks import forked

PATIENCE = 6.0  # seconds
STEP = 2  # the step in which the rank hangs
MESHES = {
    "fsdp": (2, ["micro_batch=2"]),
    "copies": (4, ["micro_batch=1", "mesh.dp_replicate=2"]),
    "ep": (4, ["micro_batch=2", "mesh.tp=2", "mesh.ep=2"]),
    "tp": (4, ["micro_batch=2", "mesh.tp=2"]),
    "cp": (4, ["micro_batch=2", "mesh.cp=2"]),
    "pp": (4, ["micro_batch=2", "mesh.pp=2"]),
}
COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "batch_isend_irecv")
PHASES = (
    "start", "data", "forward", "backward", "optimizer", "log", "checkpoint", "later", "validation", "export",
    *(f"collective_{number}" for number in (1, 4, 9)),
)  # fmt: skip


def hang() -> None:
    time.sleep(10_000)


class Fault:
    """Make this rank hang in a phase of step STEP."""

    def __init__(self, phase: str) -> None:
        self.phase, self.step, self.calls = phase, 0, 0

    def install(self, stack: ExitStack) -> None:
        import torch
        import torch.distributed as dist

        from training.checkpoint import export, storage
        from training.data.mixture import Loader
        from training.model.decoder import Decoder
        from training.observe.metrics import Metrics
        from training.optim.optimizer import Optimizer
        from training.parallel import collectives
        from training.run import session, step
        from training.run.session import Session

        def patch(owner: Any, name: str, before: Callable[[], bool]) -> None:
            real = getattr(owner, name)

            def call(*given: Any, **named: Any) -> Any:
                if before():
                    hang()
                return real(*given, **named)

            stack.enter_context(mock.patch.object(owner, name, call))

        real = Session.next_batches

        def counted(self: Session) -> Any:
            fault.step = self.state.step + 1
            return real(self)

        fault = self
        stack.enter_context(mock.patch.object(Session, "next_batches", counted))
        there = lambda: self.step == STEP  # noqa: E731
        if self.phase == "start":
            patch(session, "begin", lambda: True)
        if self.phase == "data":
            patch(Loader, "__next__", there)
        if self.phase == "forward":
            patch(Decoder, "forward", lambda: there() and torch.is_grad_enabled())
        if self.phase == "optimizer":
            patch(Optimizer, "step", there)
        if self.phase == "log":
            patch(Metrics, "log", there)
        if self.phase == "checkpoint":
            patch(storage, "write_shard", there)
        if self.phase == "later":  # the others continue while their thread writes
            patch(storage, "write_shard", lambda: True)
        if self.phase == "validation":
            patch(step, "nll", lambda: there() and not torch.is_grad_enabled())
            patch(step, "seen", lambda: there() and not torch.is_grad_enabled())
        if self.phase == "export":
            patch(export, "Weights", lambda: True)
        if self.phase == "backward":
            forward = Decoder.forward

            def hooked(model: Decoder, *given: Any, **named: Any) -> Any:
                made = forward(model, *given, **named)
                if there() and isinstance(made, torch.Tensor) and made.requires_grad:
                    made.register_hook(lambda gradient: hang())
                return made

            stack.enter_context(mock.patch.object(Decoder, "forward", hooked))
        if self.phase.startswith("collective"):
            at = int(self.phase.split("_")[1])

            def due() -> bool:
                self.calls += there()
                return self.calls == at

            for name in COLLECTIVES:
                for owner in (dist, dist.distributed_c10d, collectives):
                    if hasattr(owner, name):
                        patch(owner, name, due)


def on_rank(rank: int, world: int, port: int, victim: int, phase: str, said: str, words: list[str]) -> None:
    for output in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), output)
    import torch

    from training.config.reading import read_config
    from training.parallel import watch
    from training.run import session
    from training.run.loop import train

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(session, "guarded", partial(watch.guarded, interval=0.5)))
        if rank == victim:
            Fault(phase).install(stack)
        train(read_config("", words))


def tried(place: Path, name: str, phase: str, victim: int, words: list[str], world: int) -> tuple[str, str]:
    """Run one case, and return a verdict with the sentence that ended the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [place / f"said-{rank}" for rank in range(world)]
    for path in said:
        path.unlink(missing_ok=True)
    ranks = [
        forked().Process(target=on_rank, args=(rank, world, port, victim, phase, str(said[rank]), words))
        for rank in range(world)
    ]
    deadline = time.monotonic() + 60
    try:
        for rank in ranks:
            rank.start()
        while time.monotonic() < deadline and any(r.is_alive() for n, r in enumerate(ranks) if n != victim):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in said]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("training: ") and "ends" in line]
    if not lines:
        return ("not reached" if all("Traceback" not in t for t in texts) else "traceback"), "\n".join(texts)[-3000:]
    return judged(lines[0], victim), lines[0]


def judged(sentence: str, victim: int) -> str:
    """Return whether the sentence names the victim ("right"), others too ("more"), others alone, or nobody."""
    named = {int(number) for number in re.findall(r"rank (\d+)", sentence.partition(" while ")[0])}
    return {frozenset(): "nobody", frozenset({victim}): "right"}.get(
        frozenset(named), "more" if victim in named else "wrong"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meshes", nargs="*", choices=[[], *MESHES])
    parser.add_argument("--phases", nargs="*", default=PHASES)
    parser.add_argument("--each", type=int, default=0, help="cases of a mesh; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from tests.parallel.test_run import folder_of
    from tests.parallel.test_run import words as words_of

    chance, counts, table = random.Random(options.seed), Counter[str](), dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as name:
        place = folder_of(Path(name), num_hidden_layers=3)
        for mesh in options.meshes or MESHES:
            world, more = MESHES[mesh]
            cases = [(phase, victim) for phase in options.phases for victim in range(world)]
            for phase, victim in chance.sample(cases, options.each) if options.each else cases:
                output = place / f"{mesh}-{phase}-{victim}"
                every = ["steps=3", "checkpoint.every=2", "valid_every=2", "micro_batch=2"]
                later = phase in ("later", "export")
                every += [f"checkpoint.asynchronous={str(phase == 'later').lower()}"]
                words = words_of(place, output, *every, *more, f"patience={PATIENCE / 60}", f"export={output}/export")
                if later:
                    words = [word.replace("checkpoint.every=2", "checkpoint.every=1") for word in words]
                verdict, sentence = tried(place, mesh, phase, victim, words, world)
                counts[verdict] += 1
                table.setdefault(phase.partition("_")[0], Counter())[verdict] += 1
                print(f"{mesh:7} {phase:13} rank {victim}: {verdict:8} {sentence}", flush=True)
    for phase, found in table.items():
        print(f"{phase:12} " + ", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    print(f"{sum(counts.values())} hangs: {dict(counts)}")
    return int(counts.total() != counts["right"])


if __name__ == "__main__":
    sys.exit(main())
