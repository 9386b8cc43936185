"""Compare a checkpoint's settings with those of the resuming run, key by key.

quiet      the key changes no learned number                           nothing is said
said       the key changes the rest of the run                         one warning that names each key
refused    something in the checkpoint would mean something else       an error, unless resume.allow names the key
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.plugin import nearest

QUIET = (
    "output", "export", "push", "checkpoint", "log", "log_every", "valid_every", "eval", "profile", "memory_snapshot",
    "device", "mesh", "patience", "resume", "data.valid", "optim.skips", "lora.export",
    "islands.join", "islands.secret", "islands.certificate", "islands.authority", "islands.throttle",
    "islands.patience", "islands.listen", "islands.count", "islands.most",
)  # fmt: skip
OTHER_WEIGHTS = "the weights are the checkpoint's, whatever these say"
OTHER_ORDER = "samples are counted in another order: some come twice and some never"
REFUSED = {  # a key or its part of the config -> what happens if it is allowed
    "model.source": OTHER_WEIGHTS,
    "model.upcycle": OTHER_WEIGHTS,
    "model.random": OTHER_WEIGHTS,
    "seed": OTHER_WEIGHTS,
    "data.train": OTHER_ORDER,
    "data.stream": OTHER_ORDER,
    "data.tokenizer": OTHER_ORDER,
    "data.sequence": OTHER_ORDER,
    "data.seed": OTHER_ORDER,
    "optim.name": "moments of another rule do not fit and start again",
    "optim.spike_window": "the spike guard starts again",
}
WEIGHT = re.compile(r"data\.train\.\d+\.weight")  # said: every source continues at its position (data/mixture.py)
SHOWN = 12  # differences shown in a sentence


@dataclass(frozen=True)
class ResumeConfig:
    # keys that may differ although the checkpoint then means something else (model.source, data.train, optim.name ...);
    # a refused resume names them and says what would happen
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.allow:
            if not any(within(key, known) or within(known, key) for known in REFUSED):
                raise ValueError(
                    f"resume.allow names {key!r}, which is never refused{nearest(key, list(REFUSED))}; it takes "
                    f"{', '.join(REFUSED)}"
                )


def judge(source: Path, before: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str], warn: bool) -> None:
    """Raise a ValueError for differences that are refused; with `warn`, warn about the others.

    Both settings are as `compared` returns them.
    """
    keys = [*now, *(key for key in before if key not in now)]
    found = [key for key in keys if before.get(key) != now.get(key)]
    told = {key: f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}" for key in found}
    refused = {key: refusing(key) for key in found if refusing(key) and not within_any(key, allow)}
    if refused:
        what = "; ".join(dict.fromkeys(REFUSED[key] for key in refused.values()))
        raise ValueError(
            f"this run cannot resume from {source}: {listed([told[key] for key in refused])}; set them back, choose "
            f"another output, or write resume.allow=[{','.join(dict.fromkeys(refused.values()))}] ({what})"
        )
    if found and warn:
        warnings.warn(
            f"this run continues from {source} with other settings: {listed(list(told.values()))}", stacklevel=2
        )


def refusing(key: str) -> str:
    """Return the entry of REFUSED that covers a key, or ""."""
    return "" if WEIGHT.fullmatch(key) else within_any(key, REFUSED)


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint stores, by dotted key: all that are not quiet."""
    return {key: value for key, value in flat(settings).items() if not within_any(key, QUIET)}


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Flatten mappings and lists of mappings to values by dotted key."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {where: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= flat(inner, f"{where}.{key}" if where else key)
    return out


def within(key: str, outer: str) -> bool:
    return key == outer or key.startswith(f"{outer}.")


def within_any(key: str, outer: Iterable[str]) -> str:
    """Return the entry of `outer` that equals or contains `key`, or ""."""
    return next((name for name in outer if within(key, name)), "")


def listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def shown(value: Any) -> str:
    return "unset" if value in (None, "") else value if isinstance(value, str) else json.dumps(value)
