"""Upcycling: the converter for notebooks and scripts, the commands with values instead of words.

moe = Upcycling("llama3-8b-e8t2", source="./llama", output="./moe")
print(moe.plan)
moe.convert()
print(moe.verify())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from upcycle.config.reading import read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import card
from upcycle.converting.convert import convert
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.hub import headers
from upcycle.io.job import Worker
from upcycle.planning.plan import UpcyclePlan, build
from upcycle.verifying import verify


@dataclass(frozen=True, repr=False)
class PrintedPlan(UpcyclePlan):
    """A plan that prints as its table."""

    def __repr__(self) -> str:
        return card.table(self)


class Upcycling:
    """A config with its plan, conversion and verification. Every mistake is a ValueError."""

    def __init__(self, config: str | PathLike[str] | Mapping[str, Any] | UpcycleConfig = "", /, **keys: Any) -> None:
        """Read a YAML file, the name of a ready config, or keys and values; `keys` override them.

        experts=4, method="drop", router={"init": {"std": 0.02}}, or with a dotted key **{"router.init.std": 0.02}.
        """
        file = fspath(config) if isinstance(config, str | PathLike) else ""
        values = asdict(config) if isinstance(config, UpcycleConfig) else config if isinstance(config, Mapping) else {}
        self.config = read(UpcycleConfig, file, values=[*values.items(), *keys.items()])
        if not self.config.source and not self.config.donors:
            raise ValueError("source is not set; write source=FOLDER or source=org/name")
        self.dense = self.config.source or self.config.donors[0]

    @contextmanager
    def opened(self, open: Callable[[str], Checkpoint] = Checkpoint.open) -> Iterator[list[Checkpoint]]:
        """Open the base, then the donors, for the duration of a `with`."""
        with ExitStack() as stack:
            yield [stack.enter_context(open(name)) for name in (self.dense, *self.config.donors)]

    @cached_property
    def plan(self) -> PrintedPlan:
        """The plan of this config. Reads headers, of a hub id from there; writes nothing."""
        with self.opened(headers) as checkpoints:
            plan = build(self.config, checkpoints)
        return PrintedPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    def convert(self, output: str | PathLike[str] = "", *, worker: Worker | None = None, quiet: bool = False) -> Path:
        """Make the folder `output`, or the config's, and return it. If this plan made it already, nothing is done."""
        if output:
            self.config = replace(self.config, output=fspath(output))
            self.plan = replace(self.plan, config=replace(self.plan.config, output=fspath(output)))
        with self.opened() as checkpoints:
            return convert(self.plan, checkpoints, worker, quiet=quiet)

    def verify(
        self,
        texts: Sequence[str] = (),
        *,
        tokens: int = 1024,
        length: int = 256,
        dtype: str = "float32",
        tolerance: float | None = None,
        device: str = "cpu",
    ) -> verify.Report:
        """Hold the output to the plan, its logits on `texts` or on random tokens. See Report.held."""
        if not self.config.output:
            raise ValueError("there is no output to verify; give output=FOLDER, or convert to one first")
        return verify.verify(self.dense, self.config.output, texts, tokens, length, dtype, tolerance, device)
