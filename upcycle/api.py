"""The converter's Python API: each function does what a command does (docs/api.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from upcycle.config.reading import config_of
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import card, part
from upcycle.converting import convert as converting
from upcycle.io import hub
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.job import Worker
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.verifying import inspect as inspecting
from upcycle.verifying import verify as verifying
from upcycle.verifying.verify import Report

Config = str | PathLike[str] | Mapping[str, Any] | UpcycleConfig


@dataclass(frozen=True, repr=False)
class Plan(UpcyclePlan):
    """A plan; print it to see its table."""

    def __repr__(self) -> str:
        return card.table(self)


def plan(config: Config = "", /, **keys: Any) -> Plan:
    """Return the plan of a config (a YAML file, a ready config's name, or keys and values), changed by `keys`.

    It reads headers only, from disk or from the Hub, and writes nothing.
    """
    asked = config_of(UpcycleConfig, config, keys)
    if not asked.source and not asked.donors:
        raise ValueError("source is not set; write source=FOLDER or source=org/name")
    with opened(asked, hub.headers) as checkpoints:
        made = build(asked, checkpoints)
    return Plan(**{field.name: getattr(made, field.name) for field in fields(made)})


def convert(config: Config | Plan = "", /, *, worker: Worker | None = None, quiet: bool = False, **keys: Any) -> Path:
    """Write the folder `output` of a plan or a config and return it. A complete folder is kept.

    After a stop, the same call continues. `worker`: which of several processes this is; None: as torchrun says.
    """
    made = config if isinstance(config, Plan) else plan(config, **keys)
    if isinstance(config, Plan) and keys:
        output = fspath(keys.pop("output", made.config.output))
        if keys:
            raise ValueError(f"{', '.join(keys)} would change the plan; pass them to upcycle.plan")
        made = replace(made, config=replace(made.config, output=output))
    if not made.config.output:
        raise ValueError("output is not set; write output=FOLDER")
    with opened(made.config) as checkpoints:
        return converting.convert(made, checkpoints, worker, quiet=quiet)


def verify(
    dense: str | PathLike[str],
    moe: str | PathLike[str],
    text: Sequence[str] = (),
    *,
    tokens: int = 256,
    sequence: int = 256,
    dtype: str = "float64",
    tolerance: float | None = None,
    device: str = "cpu",
) -> Report:
    """Compare a converted folder with its plan, and both models' logits on texts or random tokens.

    With a `tolerance`, compare only the logits, of any two models. See Report.held.
    """
    return verifying.verify(fspath(dense), fspath(moe), text, tokens, sequence, dtype, tolerance, device)


def inspect(folder: str | PathLike[str], *, tensors: bool = False) -> str:
    """Describe a checkpoint folder, a part, or a model of the Hub."""
    if part.is_part(fspath(folder)):
        return part.text(part.open_part(fspath(folder)), tensors=tensors)
    with Checkpoint.open(fspath(folder)) as checkpoint:
        return inspecting.describe(checkpoint.folder, tensors=tensors)


def push(folder: str | PathLike[str], name: str, *, private: bool = False) -> str:
    """Upload a model's folder to the Hub as `org/name`, in one commit, and return the commit's address."""
    return hub.push(fspath(folder), name, private=private)


@contextmanager
def opened(config: UpcycleConfig, open: Callable[[str], Checkpoint] = Checkpoint.open) -> Iterator[list[Checkpoint]]:
    """Open the base of a config and its donors for the duration of a `with`."""
    with ExitStack() as stack:
        yield [stack.enter_context(open(name)) for name in (config.source or config.donors[0], *config.donors)]
