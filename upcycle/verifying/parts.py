"""Check a part's bytes against its record, and whether it fits a base."""

from __future__ import annotations

from pathlib import Path

from upcycle.cli.frame import printable
from upcycle.converting import part
from upcycle.io import publish, strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import build


def is_joined(folder: str | Path) -> bool:
    """Return whether a folder is a model with parts."""
    config = Path(folder) / "config.json"
    return (Path(folder) / publish.MANIFEST).is_file() and "expert_parts" in strict.read_object(config)


def verify_part(folder: str, base: str = "") -> int:
    """Print what a part is and each fault; return 0 if its bytes are what was written, and 1 if not."""
    found = part.open_part(folder)
    faults = part.damages(found)
    lines = part.described(found) if not faults else [("part", found.name)]
    if base and not faults:
        with Checkpoint.open(base) as checkpoint:
            part.check_base(found, base, part.sums_of(checkpoint))
            plan = build(part.config_on(base, [found]), [checkpoint], {})
            part.check_fits(found, plan.moe, base)
        lines.append(("fits", base))
    for name, value in [*lines, *(("fault", fault) for fault in faults), ("verdict", "BROKEN" if faults else "held")]:
        print(f"{name:<14} {printable(value)}")
    return 1 if faults else 0
