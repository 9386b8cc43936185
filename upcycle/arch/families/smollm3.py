"""SmolLM 3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from typing import Any

from upcycle.arch.families import common
from upcycle.arch.families.common import Config, Family
from upcycle.io import typed


def adapt(config: Config) -> Config:
    return {**config, "rope_theta": 2e6} if config.get("rope_theta") is None else config


def own(config: Config) -> dict[str, Any]:
    nope = nope_layers(config)
    return {"nope_layers": nope, **windows(config, nope)}


def nope_layers(config: Config) -> tuple[int, ...]:
    count = common.layers(config)
    if config.get("no_rope_layers") is None:
        every = typed.whole(config, "no_rope_layer_interval", 4)
        return tuple(range(every - 1, count, every))
    rotates = typed.wholes(config, "no_rope_layers", low=0, high=1)
    if len(rotates) < count:
        raise typed.wrong(config, "no_rope_layers", f"a list of 1 (rotates) or 0 for each of {count} layers")
    return tuple(layer for layer in range(count) if not rotates[layer])


def windows(config: Config, nope: tuple[int, ...]) -> dict[str, Any]:
    """Return the window fields; without layer_types, the layers that do not rotate have a window."""
    count, width = common.layers(config), common.window(config, None)
    on = typed.flag(config, "use_sliding_window") and width is not None
    types = ["sliding_attention" if on and layer in nope else "full_attention" for layer in range(count)]
    stated = types if config.get("layer_types") is None else config["layer_types"]
    found = common.windows_by_layer({**config, "sliding_window": width, "layer_types": stated})
    return found if found["window_layers"] else {}


FAMILY = Family(
    "smollm3",
    context=32768,
    kv_heads=4,
    tied=True,
    flags=common.ALL_BIASES,
    own=own,
    adapt=adapt,
    bos=128000,
    eos=128001,
    pad=128004,
)
