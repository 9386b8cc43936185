"""Recommend a way to train a dense model further with a number of GPUs and tokens: `upcycle recommend`.

It plans three arms for the same tokens: continued dense training, slices with a choice each, and whole copies. Each arm
gets the fastest mapping that fits by the estimates of memory and seconds. The table shows gains as they were measured,
with their size and conditions, and never extrapolates them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from training.checkpoint.layout import opened
from training.config.reading import read_config
from training.config.schema import TrainConfig
from training.estimating import hardware
from training.estimating.budget import ACCURACY, amount, few
from training.estimating.estimate import MOST_GPUS
from training.estimating.law import short
from training.estimating.mappings import AXES, Timed, ranked
from training.estimating.memory import SPARE, Model
from training.observe.flops import model_flops
from training.run.parts import source
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.values import LENGTH, at_least, check_values
from upcycle.planning.size import dense_flops, dense_parameters


@dataclass(frozen=True)
class RecommendConfig:
    source: str = ""  # the dense model: a folder, or org/name on the Hub
    gpus: str = ""  # number and card, such as 8xh100; or 4xmine.yaml with a file of `upcycle estimate measure`
    tokens: str = ""  # tokens of training, such as 10B; best if no text repeats
    sequence: int = 0  # tokens in a sequence; 0: 4096, or the model's context if it is shorter

    def __post_init__(self) -> None:
        check_values(self, "", {"sequence": at_least(0, most=LENGTH)})


# copies of sliced FFNs; the largest that fits is taken: 4, 8 and 16 gained 0.008, 0.011 and 0.015 (docs/science.md)
COPIES = (16, 8, 4, 2)
WHOLE = (8, 4)  # copies of whole FFNs; a token takes two
SLICES = 4  # slices of a copy: 2, 4 and 8 were equally good; 8 was slower, 2 faster (docs/science.md)
RECOMPUTE = ("none", "attention", "experts", "full")
NEARLY = 1.02  # mappings below this multiple of the shortest time count as equally fast
MICRO = (1, 2, 4, 8, 16, 32, 64)
STEPS = 400  # least number of steps, as in our studies, before a step gets more tokens
SMALLEST, LARGEST = 2**16, 2**22  # tokens of a step: ours on 135 M parameters; the best of arXiv 2410.07524 on 15 B
# (parameters up to which it holds, AdamW's peak): ours on 135 M parameters, SmolLM2's own at its second size, and that
# of arXiv 2410.07524 above
PEAKS = ((5e8, 5e-4), (2e9, 3e-4), (math.inf, 2e-4))
# gains against dense training on the same tokens (docs/science.md); BASIS names the model and the text
GAINS = {
    "dense": "the control",
    "slices": "-0.010 after 26 M tokens on clean held-out text (five seeds), +0.008 on law (nine)",
    "copies": "-0.012 (-0.015 to -0.010) after 26 M tokens; behind dense at equal FLOPs",
}
BASIS = f"""\
Gains are nats a token on held-out text like the training text, on SmolLM2-135M-Instruct from 4-bit weights; brackets
hold the 95 % interval over three seeds (docs/science.md). They do not carry over to other sizes: no one has measured
a large model with slices. At 15 B parameters and 1 T tokens others measured MMLU 65.3 for dense, 67.6 for 8 copies with
top-2, and 66.2 for 8 copies of 8 slices with a free choice (arXiv 2410.07524). Read text only once: slices that read
the same text three times fell behind dense. Hours count steps only:
{ACCURACY}
(docs/scaling.md)."""


@dataclass(frozen=True)
class Arm:
    """Describe one way to spend the tokens: the size of its model, and the fastest mapping that fits."""

    copies: int
    parameters: int
    flops: float  # FLOPs of a token, divided by the dense model's
    words: tuple[str, ...]  # words for `upcycle train`
    best: Timed | None  # None: nothing fits
    hours: float
    least: float  # least bytes of a GPU that any mapping takes


def recommend(asked: RecommendConfig) -> str:
    """Return a table of the three arms with memory, hours and measured gains, and the commands to run the best."""
    count, card, tokens = check_asked(asked)
    with opened(asked.source) as origin:
        dense = origin.spec
    if not isinstance(dense, DenseSpec):
        raise ValueError(f"{asked.source} is a mixture of experts already; recommend needs a dense model as source")
    if asked.sequence > dense.context:
        raise ValueError(f"sequence is {asked.sequence}, and the model's context is {dense.context}; write fewer")
    sequence = asked.sequence or min(4096, dense.context)
    run = schedule_of(dense_parameters(dense), count, tokens, sequence)
    choices = [("dense", 1), *(("slices", n) for n in COPIES), *(("copies", n) for n in WHOLE)]
    arms: dict[str, Arm] = {}
    for name, copies in tqdm(choices, desc="plans", leave=False, delay=2, disable=None):
        if name not in arms or arms[name].best is None:  # try fewer copies only if more do not fit
            arms[name] = arm_of(name, copies, asked.source, dense, run, count, card)
    return "\n".join(lines_of(asked, dense, arms, count, card, tokens))


def check_asked(asked: RecommendConfig) -> tuple[int, hardware.Hardware, float]:
    """Check the keys; return the number of GPUs, their card and the tokens."""
    if not asked.source:
        raise ValueError("source is missing; write the dense model, for instance source=./llama")
    found = re.fullmatch(r"(\d+) ?x ?(.+)", asked.gpus)
    if found is None or not 1 <= int(found[1]) <= MOST_GPUS:
        raise ValueError(f"gpus is {asked.gpus!r}; write a number and a card, for instance gpus=8xh100")
    if not asked.tokens:
        raise ValueError("tokens is missing; write how many to train on, for instance tokens=10B")
    number, _ = amount("tokens", asked.tokens)
    if number < SMALLEST:
        raise ValueError(f"tokens is {asked.tokens!r}; write at least {SMALLEST:,}, for instance tokens=10B")
    return int(found[1]), hardware.read(found[2]), number


def schedule_of(parameters: int, count: int, tokens: float, sequence: int) -> list[str]:
    """Return the words of a run that all arms share: batch, steps and learning rate."""
    step = min(max(2 ** int(math.log2(tokens / STEPS)), SMALLEST), LARGEST)
    batch = -(-max(1, step // sequence) // count) * count
    steps = max(1, round(tokens / (batch * sequence)))
    peak = next(rate for most, rate in PEAKS if parameters <= most)
    return [
        f"data.sequence={sequence}", f"batch={batch}", f"steps={steps}",
        f"schedule.peak={peak:g}", f"schedule.final={peak / 10:g}", f"schedule.warmup={min(100, -(-steps // 10))}",
    ]  # fmt: skip


def model_words(name: str, copies: int, place: str) -> tuple[str, list[str]]:
    """Return the name of an arm's ready config, and the words of its model."""
    if name == "dense":
        return "", [f"model.source={place}"]
    words = [f"model.upcycle.source={place}", f"model.upcycle.experts={copies}"]
    return ("slices", words) if name == "slices" else ("", [*words, "model.upcycle.top_k=2"])


def arm_of(
    name: str, copies: int, place: str, dense: DenseSpec, run: list[str], count: int, card: hardware.Hardware
) -> Arm:
    """Plan an arm: try all micro-batches and recompute modes, and take the fastest that fits.

    Among equally fast ones take the one with the least memory."""
    file, words = model_words(name, copies, place)
    config = read_config(file, [*words, *run, "micro_batch=1"])
    with source(config) as origin:
        spec, plan = origin.spec, origin.plan
    # FSDP with expert parallel comes first, as most people run it; use other axes only if nothing else fits
    model = Model(spec, config)
    for axes in (("ep",), AXES):
        found, least = fitting(spec, config, count, card, model, axes)
        if found:
            break
    flops = model_flops(spec, config.data.sequence) / dense_flops(dense, config.data.sequence)
    parameters = dense_parameters(dense) if plan is None else plan.sizes.total
    if not found:
        return Arm(copies, parameters, flops, (), None, math.inf, least)
    fastest = min(each.seconds.total for each, _ in found)
    near = [each for each in found if each[0].seconds.total <= NEARLY * fastest]
    best, keys = min(near, key=lambda each: each[0].memory.total)
    keys = [*keys, *(f"mesh.{axis}={n}" for axis in (*AXES, "dp_replicate") if (n := getattr(best.mesh, axis)) > 1)]
    hours = config.steps * best.seconds.total / 3600
    start = [file] if file else []
    return Arm(copies, parameters, flops, (*start, *words, *run, *keys), best, hours, least)


def fitting(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    count: int,
    card: hardware.Hardware,
    model: Model,
    axes: Sequence[str],
) -> tuple[list[tuple[Timed, list[str]]], float]:
    """Return the mappings with these axes that fit, each with the words of its micro-batch and recompute mode, and the
    least bytes of a GPU that any of them takes."""
    least, found = math.inf, list[tuple[Timed, list[str]]]()
    for recompute in RECOMPUTE:
        for micro in (m for m in MICRO if config.batch % (m * count) == 0):
            tried = replace(config, micro_batch=micro, model=replace(config.model, recompute=recompute))
            fit, own = ranked(spec, tried, count, card, model=model, axes=axes)
            least = min([least, own.memory.total, *(each.memory.total for each in fit)])
            if not fit:
                break
            found += [(each, [f"micro_batch={micro}", f"model.recompute={recompute}"]) for each in fit]
    return found, least


def lines_of(
    asked: RecommendConfig, dense: DenseSpec, arms: dict[str, Arm], count: int, card: hardware.Hardware, tokens: float
) -> Iterator[str]:
    """Yield the table, the basis of its gains, and the commands."""
    size = short(dense_parameters(dense))
    yield f"{asked.source}, {size} parameters, {short(tokens)} tokens, {count} {card.name} of {card.memory:g} GB\n"
    yield f"{'':9}{'model':31}{'parameters':>10}{'FLOPs':>8}{'GB a GPU':>10}{'hours':>9}   held-out loss, minus dense"
    about = {
        "dense": "as it is",
        "slices": f"{{}} copies of {SLICES} slices, top-{SLICES}",
        "copies": "{} copies, top-2",
    }
    for name, arm in arms.items():
        line = f"{name:9}{about[name].format(arm.copies):31}{short(arm.parameters):>10}{arm.flops:7.2f}x"
        if arm.best is None:
            yield f"{line}   does not fit: it takes at least {(arm.least + SPARE) / 1e9:,.0f} GB a GPU"
        else:
            yield f"{line}{arm.best.memory.total / 1e9:10.0f}{few(arm.hours, 1):>9}   {GAINS[name]}"
    yield f"\n{BASIS}\n"
    best = next((name for name in ("slices", "copies", "dense") if arms[name].best is not None), "")
    if not best:
        yield "Nothing fits: take more GPUs, a card with more memory, or a shorter sequence."
        return
    words = [*arms[best].words, *([f"nproc={count}"] if 1 < count <= card.node else [])]
    words += ["data.train=[runs/data]", "data.valid=[runs/valid]", f"output=runs/{best}", f"export={best}"]
    yield f"upcycle prepare runs/data tokenizer={asked.source} sources=[YOUR_TEXT]"
    yield f"upcycle prepare runs/valid tokenizer={asked.source} sources=[OTHER_TEXT]"
    yield f"upcycle train {' '.join(words)}"
    if count > card.node:
        yield f"Run the last under Slurm on {-(-count // card.node)} nodes: sbatch configs/launch/slurm.sbatch WORDS"
