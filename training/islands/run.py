"""Run a server of islands from a config, export its model, and try islands on one machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import layout
from training.checkpoint.export import export, exported
from training.checkpoint.layout import Origin
from training.checkpoint.state import CHECKPOINTS, found, remove_waste, step_of
from training.config.schema import TrainConfig
from training.experts import SPECIFICATION
from training.islands.center import Bounds, Center
from training.islands.journal import Journal
from training.islands.link import frames
from training.islands.link.server import Server
from training.islands.places import Layout, Place
from training.islands.plan import agreed
from training.model.decoder import Decoder
from training.model.moe import MoE
from training.optim.config import settled
from training.optim.copies import is_stack, pull_
from training.optim.slots import make_slot
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.processes import alone, end_with_parent
from training.run.parts import divided, observing, source
from training.run.preflight import ISLANDS, check_export, check_own, check_writable
from training.run.stop import Stop
from upcycle.cli.frame import again
from upcycle.io import disk

Ready = Callable[[Server], Callable[[], bool]]


def serve(
    config: TrainConfig, ready: Ready = lambda server: lambda: False, *, stays: bool = False
) -> tuple[str, Center]:
    """Serve until all islands have left or the server is asked to stop; return a sentence, and the state at the end.

    If all had left before, only write a missing export. `ready` is called when the server listens, and returns a
    function that says whether it should stop; a server that `stays` ends only then. An island that was killed between
    its leave and its last save comes back for its last answer."""
    if not config.output:
        raise ValueError("output is not set; write output=FOLDER for what the server keeps")
    check_writable("output", config.output)
    check_own(Path(config.output))
    folder = Path(config.output) / ISLANDS
    if not folder.exists():  # otherwise the journal says whether the export may be this server's own
        check_export(config, 0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a server of islands is one process; start it without torchrun")
    secret = frames.secret_of(config.islands.secret)
    with alone(Path(config.output)), Stop() as stop, source(config, observing(config, torch.device("cpu"))) as origin:
        mesh = ParallelMesh(MeshConfig(), device_type="cpu")
        model = made(config, origin, mesh)
        own = layout_of(model)
        center = Center(own, vector(model), config.islands, bias_of(config, model), bounds_of(config, own))
        del model
        journal = Journal(folder, center)
        try:
            check_export(config, config.steps if center.done else 0)
            if not center.done:
                server = Server(center, journal, config.islands, secret, agreed(config))
                print(f"islands: {center.layout.size:,} numbers, listening on port {server.port}", flush=True)
                asked = ready(server)
                server.run(lambda: stop.signal is not None or asked(), stays)
                journal.save()
        finally:
            journal.close()
        said = (
            f"{center.pushes} pushes, {center.steps} steps, {center.tokens:,} tokens of {len(center.members)} islands"
        )
        if config.export and center.done:
            if not exported(Path(config.export)):
                model = filled(config, made(config, origin, mesh), center)
                export(model, origin, config.export, facts={"tokens": center.tokens})
            said += f"; {config.export} is the model"
        return said, center


def made(config: TrainConfig, origin: Origin, mesh: ParallelMesh) -> Decoder:
    """Make the model of step 0 in this process alone."""
    alone = replace(config.model, recompute="none", compile=False, transformer_engine=(), expert_backend=SPECIFICATION)
    spec = origin.spec
    layers = range(origin.dense.layers)
    model = divided(replace(config, model=alone), origin, mesh, layers, torch.device("cpu"))
    if config.model.random:
        layout.initialise(model, config.seed)
    else:
        layout.load(model, origin)
    layout.begin_adapters(model, config.seed)
    assert model.moe is None or model.moe is spec
    return model


def learned(model: Decoder) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def layout_of(model: Decoder) -> Layout:
    return Layout({name: tuple(parameter.shape) for name, parameter in learned(model).items()})


def vector(model: Decoder) -> Tensor:
    parameters = learned(model)
    return torch.cat([parameters[name].detach().float().view(-1) for name in sorted(parameters)])


def routers(model: Decoder) -> list[Tensor]:
    blocks = [layer.ffn for layer in model.layers.values() if isinstance(layer.ffn, MoE)]
    return [block.router.bias for block in blocks if block.router.bias is not None]


def bias_of(config: TrainConfig, model: Decoder) -> Tensor | None:
    """Return the routers' selection biases (layers, experts), or None where load does not move them."""
    return torch.stack(routers(model)) if config.balance.bias_rate else None


def bounds_of(config: TrainConfig, layout: Layout) -> Bounds:
    """Return what the config allows a push to change."""

    def empty(place: Place) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(place.shape, device="meta"))

    slots = [make_slot(config.optim, p.name, empty(p), {}) for p in layout.places.values()]
    rates = torch.tensor([slot.multiplier for slot in slots], dtype=torch.float64)
    decays = torch.tensor([slot.decay for slot in slots], dtype=torch.float64) * rates
    return Bounds(config.schedule.peak, rates, decays, config.balance.bias_rate)


@torch.no_grad()
def filled(config: TrainConfig, model: Decoder, center: Center) -> Decoder:
    """Fill a model with the server's weights, its copies pulled together as an export has them."""
    shrink = (settled(config.optim, model.moe).shrink or 0.0) if center.masters else 0.0
    for name, parameter in learned(model).items():
        place = center.layout.places[name]
        slot = make_slot(config.optim, name, parameter, {})
        scale = float(torch.tensor(-center.decay * slot.decay * slot.multiplier, dtype=torch.float64).exp())
        parameter.copy_(scale * center.rule.model[place.first : place.last].view_as(parameter))
        if shrink and model.moe is not None and is_stack(name):
            pull_(parameter, model.moe.granularity, shrink)
    if center.bias is not None:
        for bias, moved in zip(routers(model), center.bias, strict=True):
            bias.copy_(moved)
    return model


# ---- a try on one machine


def local(config: TrainConfig, words: Sequence[str]) -> str:
    """Run a server and its islands as processes of this machine, in OUTPUT/islands, OUTPUT/island-0 and so on."""
    folder, count = Path(config.output), config.islands.local
    if not config.output:
        raise ValueError("output is not set; write output=FOLDER for the islands' folders")
    check_own(folder)
    secret = folder / "secret"
    with alone(folder):
        if not secret.exists():
            disk.write_blocks(secret, [os.urandom(32).hex().encode()], mode=0o600)
    own = replace(config.islands, local=0, count=count, listen="127.0.0.1:0", secret=str(secret))
    islands: list[subprocess.Popen[bytes]] = []
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **os.environ}

    def ready(server: Server) -> Callable[[], bool]:
        for number in range(count):
            more = [
                "islands.local=0", f"islands.join=127.0.0.1:{server.port}", f"islands.name=island-{number}",
                f"islands.secret={secret}", f"output={folder / f'island-{number}'}", "export=",
            ]  # fmt: skip
            command = again("train", *words, *more)
            # a killed server must not leave islands that hold their folders' locks
            islands.append(subprocess.Popen(command, env=environment, preexec_fn=end_with_parent()))
        # end if any island fails: the others would wait for it, or train without it
        return lambda: (
            any(island.poll() not in (None, 0) for island in islands) or all(island.poll() == 0 for island in islands)
        )

    done = False
    try:
        said, center = serve(replace(config, islands=own), ready, stays=True)
        done = center.done
    finally:
        for island in islands if not done else ():
            island.terminate()
        codes = [ended(island, None if done else config.islands.patience * 60) for island in islands]
    if any(codes):
        raise ValueError(f"{sum(map(bool, codes))} of {count} islands ended early; run the same command to continue")
    for number in range(count) if done and not islands else ():  # all had left in an earlier run
        with alone(folder / f"island-{number}"):  # which removes what a killed island left
            remove_waste(folder / f"island-{number}" / CHECKPOINTS)
            saved = found(folder / f"island-{number}" / CHECKPOINTS)
        # an island that was killed after it left, before it saved, has pushed its last step
        if saved and step_of(saved[0]) < config.steps and center.steps < count * config.steps:
            raise ValueError(
                f"steps={config.steps}, and the islands in {folder} left for good after {step_of(saved[0])}; for more "
                "steps choose another output, and set model.source to their export"
            )
    return f"{folder} is trained: {said}; the islands are in {folder}/island-0 and so on"


def ended(island: subprocess.Popen[bytes], seconds: float | None) -> int:
    """Return the exit code of a process; kill it if it has not ended after so many seconds."""
    try:
        return island.wait(seconds)
    except subprocess.TimeoutExpired:
        island.kill()
        return island.wait()
