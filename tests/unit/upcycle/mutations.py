"""A config.json changed in one key, as a hand or a broken tool might: what fuzz tests of reading share."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import upcycle

ROOT = Path(upcycle.__file__).parent / "arch"
VALUES: list[Any] = [
    None, "", "x", "2", "a\nb", [], ["x"], [0], [None], [[]], {}, {"x": []}, 0, 1, 3, -1, 10**9, 10**19, 0.5, -0.0, -2.5, 1e9,
    1e300, float("inf"), float("nan"), True, False,
]  # fmt: skip


def keys_read(package: str, name: str) -> list[str]:
    """Every word in quotes that could be a key in the code that reads this architecture, whether configs have it."""
    files = [ROOT / package / f"{name}.py", ROOT / package / "common.py", ROOT / "families" / "common.py"]
    files = [file for file in files if file.is_file()]
    return sorted({key for file in files for key in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', file.read_text())})


def mutants(config: Mapping[str, Any], keys: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what was changed, the config with it): every key, and every key inside a value, to every one of VALUES."""
    for key in sorted({*config, *keys} - {"model_type"}):
        for value in VALUES:
            yield f"{key}={value!r}", {**config, key: value}
        inner = config.get(key)
        for name in inner if isinstance(inner, dict) else ():
            for value in VALUES:
                yield f"{key}.{name}={value!r}", {**config, key: {**inner, name: value}}


def unreadable(
    config: Mapping[str, Any], keys: list[str], read: Callable[[dict[str, Any]], object], share: float = 1.0
) -> list[str]:
    """The changes under which `read` neither works nor raises a ValueError of one line, at once."""
    found, draw = [], random.Random(0)
    for what, mutant in mutants(config, keys):
        if draw.random() >= share:
            continue
        begun = time.process_time()
        try:
            read(mutant)
        except ValueError as error:
            if "\n" in str(error) or len(str(error)) > 700:
                found.append(f"{what}: {error}")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
        if time.process_time() - begun > 5:
            found.append(f"{what}: {time.process_time() - begun:.0f} s")
    return found


def written(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder
