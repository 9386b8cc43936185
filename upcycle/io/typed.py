"""Read the keys of an untrusted config.json, and check their types and ranges.

Each function returns the value of a key, or `default` if the key is absent or null; without a default the key is
required. A wrong value raises a ValueError of one sentence that names the key, the value and what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from upcycle.io import strict

T = TypeVar("T")
W = TypeVar("W", bound=str)
Config = Mapping[str, Any]
LARGEST = 2**31 - 1  # largest size; kernels and other readers of the model count in int32
SMALL, LARGE = 1e-9, 1e9  # bounds of a factor; float16 and bfloat16 are useless beyond them


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(
            f"config.json of this {model_type(config)} model has no {key!r}, "
            "which every model of this type states; is the file complete?"
        )
    return config[key]


def whole(config: Config, key: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
    return checked(
        config, key, default, lambda value: is_whole(value, low, high), f"a whole number {range_of(low, high)}"
    )


def number(
    config: Config, key: str, default: float | None = None, *, low: float = SMALL, high: float = LARGE
) -> int | float:
    return checked(
        config, key, default, lambda value: is_number(value, low, high), f"a number from {low:g} to {high:g}"
    )


def flag(config: Config, key: str, default: bool = False) -> bool:
    """Read true or false; null is false, as in the code of most models."""
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise wrong(config, key, "true or false")
    return bool(value)


def word(config: Config, key: str, default: W | None, known: Collection[W]) -> W:
    return checked(config, key, default, lambda value: value in list(known), f"one of {', '.join(sorted(known))}")


def text(config: Config, key: str, default: str | None = None) -> str:
    return checked(config, key, default, lambda value: isinstance(value, str) and value != "", "a name")


def wholes(config: Config, key: str, default: list[int] | None = None, *, low: int, high: int) -> list[int]:
    """Read a list of whole numbers, which may be empty."""
    return items(config, key, default, lambda item: is_whole(item, low, high), f"whole numbers {range_of(low, high)}")


def numbers(config: Config, key: str, default: list[float] | None = None) -> list[float]:
    what = f"numbers from {SMALL:g} to {LARGE:g}"
    return items(config, key, default, lambda item: is_number(item, SMALL, LARGE), what)


def names(config: Config, key: str, default: list[str] | None = None) -> list[str]:
    return items(config, key, default, lambda item: isinstance(item, str), "names")


def items(config: Config, key: str, default: list[T] | None, fits: Callable[[Any], bool], what: str) -> list[T]:
    return checked(
        config, key, default, lambda value: isinstance(value, list) and all(map(fits, value)), f"a list of {what}"
    )


def checked(config: Config, key: str, default: T | None, fits: Callable[[Any], bool], want: str) -> T:
    """Return the value of a key if `fits` accepts it; else raise a ValueError that says what it must be."""
    value: Any = config.get(key)
    if value is None:
        value = need(config, key) if default is None else default
    if not fits(value):
        raise wrong(config, key, want)
    found: T = value
    return found


def wrong(config: Config, key: str, want: str) -> ValueError:
    got = strict.short(config.get(key))
    return ValueError(f"config.json of this {model_type(config)} model has {key}={got}; it must be {want}")


def is_whole(value: Any, low: int, high: int) -> bool:
    return strict.is_whole(value) and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    return strict.is_number(value) and low <= value <= high  # False for NaN


def range_of(low: int, high: int) -> str:
    return f"of at least {low}" if high == LARGEST else f"from {low} to {high}"


def model_type(config: Config) -> str:
    return f"{config.get('model_type')!s:.60}"
