"""Make the sections about trainings for reports and studies: losses, experts, cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluation.judge.runs import Arms, Band, mean
from evaluation.judge.seeds import LEAST
from evaluation.show.page import Folded, Grid, Palette, Section, Table
from evaluation.show.pictures import Curve, Curves, curves, short
from training.observe.metrics import duration

AXES = (("tokens", "tokens"), ("flops", "FLOPs of continued training"), ("seconds", "seconds of training"))
OF_LAYERS = {  # a layer's measure -> title, unit, whether the axis starts at zero
    "max_over_mean": ("Fullest expert", "its load / the mean", False),
    "entropy": ("Entropy of the load", "1: balance", False),
    "whole": ("Whole FFNs", "share of tokens whose choice is a whole FFN", True),
    "missing": ("Slices missing", "of a token's choice", True),
    "doubled": ("Slices doubled", "of a token's choice", True),
    "dropped": ("Tokens dropped", "share", True),
}
Bands = Mapping[str, Sequence[Band]]


def loss_section(
    arms: Iterable[str], drawn: Bands, differences: Bands, heads: Iterable[str], control: str, color: Palette, *,
    about: str = "", first: Sequence[Curves | None] = (), last: Sequence[Any] = (),
) -> Section:  # fmt: skip
    """Show validation losses by tokens, FLOPs and seconds, and their difference to the control by tokens.

    `heads` names the sets and means to show open; the others are folded. `first` and `last` are blocks around them.
    """
    made = {name: loss_pictures(name, of, differences.get(name, ()), control, color) for name, of in drawn.items()}
    pictures = [*first, *(picture for name in heads for picture in made.pop(name, ()))]
    folded = [picture for each in made.values() for picture in each]
    blocks: list[Any] = [color.legend(arms), Grid(pictures)] if any(pictures) else []
    if any(folded):
        blocks.append(Folded(f"Each validation set by itself: {', '.join(made)}", [Grid(folded)]))
    return Section(
        "Loss",
        "Dots are validations; with several seeds they are the mean, with a band from the lowest seed to the "
        "highest. For a "
        f"difference the band is the 95 % interval over seeds (none with fewer than {LEAST}). Seconds count "
        f"training steps, without validation. {about}",
        [*blocks, *last],
    )


def loss_pictures(
    name: str, made: Sequence[Band], differences: Sequence[Band], control: str, color: Palette
) -> list[Curves | None]:
    drawn = [curves(f"Loss, {name}", "nats a token", unit, lines(made, axis, color)) for axis, unit in AXES]
    if differences:
        unit = f"{control} is 0, nats a token"
        drawn.append(curves(f"Difference, {name}", unit, "tokens", lines(differences, "tokens", color)))
    return drawn


def lines(bands: Sequence[Band], axis: str, color: Palette) -> list[Curve]:
    """Return the bands over an axis; empty if it was not logged."""
    return [
        Curve(b.arm, color[b.arm], [getattr(at, axis) for at in b.spent], b.mean, (), True, b.low, b.high)
        for b in bands
        if len(b.spent) == 1 or any(getattr(at, axis) for at in b.spent)
    ]


def experts_section(layers: Mapping[str, Mapping[str, Mapping[int, float]]], overall: Bands, color: Palette) -> Section:
    """Show the routers' logs: by layer at the last logged step, and over the training."""
    pictures = []
    for what, by_arm in layers.items():
        title, unit, zero = OF_LAYERS.get(what, (what.replace("_", " "), "", False))
        found = [
            Curve(arm, color[arm], [float(layer) for layer in mine], list(mine.values()), dots=True)
            for arm, mine in by_arm.items()
        ]
        pictures.append(curves(title, unit, "layer", found, y_zero=zero, start=False))
    for what, bands in overall.items():
        title, unit, zero = OF_LAYERS.get(what, (what.replace("_", " "), "", False))
        worst = ", worst layer" if what == "max_over_mean" else ", all layers"
        pictures.append(curves(title + worst, unit, "tokens", lines(bands, "tokens", color), y_zero=zero))
    arms = dict.fromkeys(arm for by_arm in layers.values() for arm in by_arm)
    return Section(
        "Experts in training",
        "Means over seeds from the training logs: by layer at the last logged step, and over the training. A choice "
        "is whole if it has every slice of a dense FFN equally often, from any copies; any other choice is not an "
        "FFN that was "
        "ever trained.",
        [color.legend(arms), Grid(pictures)] if any(pictures) else [],
    )


def cost_section(arms: Arms) -> Section:
    """Show the cost of each arm."""
    rows = []
    for arm, runs in arms.items():
        spent = {name: mean(getattr(run.spent, name) for run in runs) for name in ("tokens", "flops", "seconds")}
        seconds, pace, memory = (
            spent["seconds"], mean(run.tokens_per_s for run in runs), max(run.memory_gb for run in runs),
        )  # fmt: skip
        rows.append((
            arm, str(len(runs)), f"{runs[0].steps:,}", some(runs[0].whole_tokens), some(runs[0].flops_per_token),
            some(spent["flops"]), duration(seconds) if seconds else "", f"{pace:,.0f}" if pace else "",
            f"{memory:.2f}" if memory else "",
        ))  # fmt: skip
    head = ("", "runs", "steps", "tokens", "FLOPs a token", "FLOPs so far", "time so far", "tokens/s", "memory, GB")
    return Section(
        "What it took",
        "Continued training: means over seeds, and the largest memory. A token's FLOPs are forward and backward of "
        "matrices "
        "and causal attention, without weight gradients of frozen weights. Time counts training steps; runs "
        "that share a device or a processor slow each other.",
        [Table(head, rows)] if rows else [],
    )


def some(value: float) -> str:
    """Write a number in few digits; nothing for 0, which means that it was not logged."""
    return short(value) if value else ""
