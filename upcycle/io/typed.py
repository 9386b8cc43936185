"""Keys of a config.json, which a stranger wrote, read with their type and range.

Each function returns the value of a key, or `default` if the key is absent or null; without a default it must be there.
Any other value is a ValueError of one sentence that names the key, what was got and what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from upcycle.io.strict import short

T = TypeVar("T")
W = TypeVar("W", bound=str)
Config = Mapping[str, Any]
LARGEST = 2**31 - 1  # of a size; more overflows int32, which kernels and other readers of the model count in
SMALL, LARGE = 1e-9, 1e9  # of a factor; beyond them float16 and bfloat16 are of no use


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(
            f"config.json of this {model_type(config)} model has no {key!r}, "
            "which every such model states; is the file complete?"
        )
    return config[key]


def whole(config: Config, key: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
    value = stated(config, key, default)
    if not is_whole(value, low, high):
        raise wrong(config, key, f"a whole number {between(low, high)}")
    return int(value)


def number(
    config: Config, key: str, default: float | None = None, *, low: float = SMALL, high: float = LARGE
) -> int | float:
    value = stated(config, key, default)
    if not is_number(value, low, high):
        raise wrong(config, key, f"a number from {low:g} to {high:g}")
    found: int | float = value
    return found


def flag(config: Config, key: str, default: bool = False) -> bool:
    """Here null is false, as it is to the code of most models."""
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise wrong(config, key, "true or false")
    return bool(value)


def word(config: Config, key: str, default: W | None, known: Collection[W]) -> W:
    value = stated(config, key, default)
    for name in known:
        if name == value:
            return name
    raise wrong(config, key, f"one of {', '.join(sorted(known))}")


def text(config: Config, key: str, default: str | None = None) -> str:
    value = stated(config, key, default)
    if not isinstance(value, str) or not value:
        raise wrong(config, key, "a name")
    return value


def wholes(config: Config, key: str, default: list[int] | None = None, *, low: int, high: int) -> list[int]:
    """A list, which may be empty."""
    return items(config, key, default, lambda item: is_whole(item, low, high), f"whole numbers {between(low, high)}")


def numbers(config: Config, key: str, default: list[float] | None = None) -> list[float]:
    return items(
        config, key, default, lambda item: is_number(item, SMALL, LARGE), f"numbers from {SMALL:g} to {LARGE:g}"
    )


def names(config: Config, key: str, default: list[str] | None = None) -> list[str]:
    return items(config, key, default, lambda item: isinstance(item, str), "names")


def items(config: Config, key: str, default: list[T] | None, fits: Callable[[Any], bool], what: str) -> list[T]:
    value = stated(config, key, default)
    if not isinstance(value, list) or not all(map(fits, value)):
        raise wrong(config, key, f"a list of {what}")
    return value


def wrong(config: Config, key: str, want: str) -> ValueError:
    return ValueError(
        f"config.json of this {model_type(config)} model has {key}={short(config.get(key))}; it must be {want}"
    )


def is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # false of NaN


def between(low: int, high: int) -> str:
    return f"of at least {low}" if high == LARGEST else f"from {low} to {high}"


def model_type(config: Config) -> str:
    return f"{config.get('model_type')!s:.60}"


def stated(config: Config, key: str, default: T | None) -> Any:
    value = config.get(key)
    return value if value is not None else need(config, key) if default is None else default
