"""Print tables of the memory, seconds, hours and money of a training run on any mapping: `upcycle estimate`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from training.checkpoint.layout import Origin
from training.config.reading import read_config
from training.config.schema import ModelConfig, TrainConfig
from training.config.stages import Stage, stages_of
from training.estimating import fitting, hardware
from training.estimating.budget import advised, amount, bill, few
from training.estimating.mappings import AXES, Timed, data_ranks, mappings, micro_batches, ranked, refused
from training.estimating.memory import Model, memory, sized
from training.estimating.seconds import RANDOM, Routing, step
from training.experts import capabilities
from training.islands import plan as islands
from training.islands.config import MOST
from training.model.nf4 import NF4
from training.observe.flops import model_flops
from training.optim.slots import learning
from training.optim.teacher import check_teacher
from training.parallel.mesh import MeshConfig, check
from training.run.parts import held_in, source, taught_by, whole_on_meta
from training.run.preflight import check_optim
from upcycle import plugin
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.reading import find, read, read_own
from upcycle.config.ready import TRAIN
from upcycle.config.values import at_least, check_values, finite
from upcycle.io import strict

MOST_GPUS = 100_000  # the search of all mappings still ends in time for so many


@dataclass(frozen=True)
class EstimateConfig:
    gpus: int = 0  # number of GPUs to plan for
    hardware: str = ""  # h100 | h200 | b200, or a file that `upcycle estimate measure` wrote: predicts seconds
    # "100B tokens", "1e22 FLOPs" or "5000 GPU-hours" of training: predicts hours, GPU-hours and money
    budget: str = ""
    price: float = 0.0  # price of a GPU-hour, in any currency
    seen: str = ""  # tokens that the dense model was trained on, such as 15T: shows the loss by the law of upcycling
    islands: int = 0  # number of islands with `gpus` GPUs each (islands.join): shows their traffic
    link: str = ""  # speed between the islands and their server, such as 1Gb/s

    def __post_init__(self) -> None:
        rules = {"gpus": at_least(0, most=MOST_GPUS), "price": finite(), "islands": at_least(0, most=MOST)}
        check_values(self, "", rules)


FEW = 1024  # tokens of a step on each GPU; with fewer every mapping is bad
HOSTED = 0.3  # share of a step that waits for the host; below it a larger micro_batch saves little
BATCH = 2**22  # tokens of a step: larger and smaller steps were worse for upcycled large models (arXiv 2410.07524)
# keys of a hardware file that each part of a step depends on
DEPENDS = {
    "products": ("products",), "experts": ("products",), "attention": ("attention",), "memory": ("bandwidth",),
    "rows": ("rows", "network"), "tensor": ("link", "network"), "gathers": ("link", "network"),
    "bubble": ("products", "network"), "optimizer": ("bandwidth",), "host": ("host",),
}  # fmt: skip


def table(
    spec: DenseSpec | MoESpec, config: TrainConfig, world: int, rows: int = 12, teacher: DenseSpec | None = None
) -> str:
    own, stages = config.mesh, stages_of(config)
    models = [Model(spec, stage.config, teacher, config) for stage in stages]
    planned = [memory(spec, stage.config, world, model) for stage, model in zip(stages, models, strict=True)]
    fullest = max(range(len(stages)), key=lambda number: planned[number].total)
    config, model = stages[fullest].config, models[fullest]
    every = tqdm(list(mappings(spec, config, world)), desc="mappings", leave=False, delay=2, disable=None)
    found = [(mesh, memory(spec, replace(config, mesh=mesh), world, model)) for mesh in every]
    found = sorted(((mesh, size) for mesh, size in found if mesh != own), key=lambda item: item[1].total)[:rows]
    names = ["weights", "gradients", "moments", "gathered", "activations", "loss"]
    names += ["teacher", "total"] if teacher else ["total"]
    names += ["host"] if config.checkpoint.asynchronous else []
    lines = ["  ".join(f"{name:>11}" for name in names) + f"   GB on the fullest of {world} GPUs"]
    says = [f"   (this config{f', {stage.name}' if stage.name else ''})" for stage in stages] + [""] * len(found)
    for (mesh, size), said in zip([*((own, size) for size in planned), *found], says, strict=True):
        cells = "  ".join(f"{getattr(size, name) / 1e9:11.2f}" for name in names)
        lines.append(f"{cells}   {axes(mesh)}{said}")
    unfit = dict.fromkeys(refused(stage.config, world) for stage in stages)
    return "\n".join([*lines, *filter(None, unfit)])


def axes(mesh: MeshConfig) -> str:
    return " ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES)


def planned(config: TrainConfig) -> DenseSpec | MoESpec:
    """Return the sizes of the config's model."""
    with source(config) as origin:
        return origin.spec


def clocked(
    spec: DenseSpec | MoESpec,
    config: TrainConfig,
    asked: EstimateConfig,
    card: hardware.Hardware,
    rows: int = 12,
    teacher: DenseSpec | None = None,
    whole: TrainConfig | None = None,
    routing: Routing | None = None,
    spec_of: fitting.SpecOf = planned,
) -> str:
    """Return the table of the fastest mappings that fit, and the hours and money of the budget with the first."""
    fit, own = ranked(spec, config, asked.gpus, card, teacher, whole, routing)
    unfit = refused(config, asked.gpus)
    if not fit:
        case = fitting.Case(spec, config, asked.gpus, card, spec_of, teacher, whole)
        raise ValueError(
            unfit
            or f"this step fits no mapping of {asked.gpus} {card.name}; the config's own mapping takes "
            f"{own.memory.total / 1e9:.0f} GB of {card.memory:g}. {fitting.suggestions(case)}"
        )
    tokens, flops = config.batch * config.data.sequence, model_flops(spec, config.data.sequence)
    shown = fit[:rows] + ([] if own in fit[:rows] or unfit else [own])
    lines = [
        "  rank   tokens/s    of a GPU   ms a step    MFU      GB   mapping; parts that are slower than in the first"
    ]
    for each in shown:
        rate = tokens / each.seconds.total
        share = rate * flops / asked.gpus / card.peak / 1e12
        words = axes(each.mesh) + (f" dp_replicate={each.mesh.dp_replicate}" if each.mesh.dp_replicate > 1 else "")
        place = f"{fit.index(each) + 1}" if each in fit else "no fit"
        lines.append(
            f"{place:>6} {rate:10,.0f}  {rate / asked.gpus:10,.0f}  {each.seconds.total * 1e3:10,.0f} {share:6.1%} "
            f"{each.memory.total / 1e9:7.1f}   {words}{' (this config)' if each is own else ''}{why(each, fit[0])}"
        )
    first = fit[0]
    parts = sorted(vars(first.seconds).items(), key=lambda item: -item[1])
    lines.append(
        f"{card.name}, {len(fit):,} mappings fit. The parts of the first in ms: "
        + ", ".join(f"{name} {seconds * 1e3:,.0f}" for name, seconds in parts if seconds >= 5e-4)
    )
    unsure = [(name, key) for name, _ in parts for key in DEPENDS[name] if key in card.sheet]
    if unsure and parts[0][1] > 0:
        keys = ", ".join(dict.fromkeys(key for _, key in unsure))
        lines.append(
            f"Not measured on this card: {keys}. Before you rent many, measure the time of {unsure[0][0]} on one."
        )
    if unfit:
        lines.append(unfit)
    halves, odd = divmod(micro_batches(config, first.mesh, asked.gpus), 2)
    if first.seconds.host > HOSTED * first.seconds.total and not odd and halves >= first.mesh.pp:
        lines.append(
            f"The GPUs of the first wait {first.seconds.host / first.seconds.total:.0%} of a step for the host, which "
            f"launches kernels too slowly; try micro_batch={2 * config.micro_batch}, or more if it fits."
        )
    if tokens < FEW * asked.gpus:
        lines.append(
            f"A step has {tokens:,} tokens, {tokens / asked.gpus:,.0f} a GPU, which are too few for {asked.gpus:,} "
            f"GPUs; write batch={math.ceil(BATCH / config.data.sequence)} for steps of 4 M tokens, which were best in "
            "upcycling (arXiv 2410.07524), or take fewer GPUs."
        )
    left = [name for name, there in uncounted(config).items() if there]
    if left:
        lines.append(f"These are the seconds of plain training; they leave out: {', '.join(left)}.")
    if asked.budget:
        for name, each in {"this config": own, "the first": first}.items():
            if each in fit and (name == "this config" or own is not first):
                said = bill(asked.budget, asked.price, asked.gpus, tokens, flops, each.seconds.total)
                lines.append(f"{asked.budget} with {name}: {said}")
    return "\n".join(lines)


def uncounted(config: TrainConfig) -> dict[str, bool]:
    """Name all that training.estimating.seconds does not count, and tell whether this config has it."""
    return {
        "adapters": config.lora.rank > 0,
        "a teacher": config.teacher.asked,
        "frozen parameters": any(group.lr == 0 for group in config.optim.groups),
        "decoding experts of 4 bits": config.model.frozen == NF4,
        "Muon's products": config.optim.name == "muon",
        "documents (less attention)": config.data.mask_documents,
        f"{config.model.computes()} (they are bfloat16's)": config.model.computes() != "bfloat16",
        "FP8": "linear_fp8" in config.model.transformer_engine,
    }


def why(each: Timed, first: Timed) -> str:
    """Name the two parts in which a mapping loses most time against the first."""
    more = {name: value - getattr(first.seconds, name) for name, value in vars(each.seconds).items()}
    most = sorted((item for item in more.items() if item[1] >= 5e-4), key=lambda item: -item[1])[:2]
    return "; " + ", ".join(f"{name} +{value * 1e3:,.0f} ms" for name, value in most) if most else ""


def split(words: list[str]) -> tuple[EstimateConfig, list[str]]:
    """Read the keys of EstimateConfig from the words; return them and the other words, which belong to training."""
    asked, rest = read_own(EstimateConfig, words)
    check_asked(asked)
    return asked, rest


def check_asked(asked: EstimateConfig) -> None:
    """Refuse keys that allow no estimate."""
    if asked.gpus < 1:
        raise ValueError("say for how many GPUs to plan, for instance gpus=8")
    for name in ("budget", "seen"):
        if getattr(asked, name):
            amount(name, getattr(asked, name))
    if bool(asked.islands) != bool(asked.link):
        raise ValueError("say how many islands, and over what link, for instance islands=4 link=1Gb/s")
    if not asked.hardware and (asked.price or asked.budget):
        raise ValueError("budget and price need seconds, and hardware is not set; write for instance hardware=h100")
    for key in ("seen", "price"):
        if getattr(asked, key) and not asked.budget:
            raise ValueError(
                f'{key} needs a budget, and none is set; write for instance budget="100B tokens", or leave {key} out'
            )


def seconds_of(spec: DenseSpec | MoESpec, config: TrainConfig, world: int, card: hardware.Hardware) -> float:
    """Return the seconds of one step with the config's own mapping."""
    return step(spec, config, world, card).total


def lasting(stage: Stage, spec: DenseSpec | MoESpec, world: int, card: hardware.Hardware) -> str:
    """Return a sentence with the steps, tokens and hours of a stage with its own mapping."""
    config = stage.config
    if unfit := refused(config, world):
        return f"{stage.name or 'stage'}: {unfit}"
    tokens = config.steps * config.batch * config.data.sequence
    hours = config.steps * seconds_of(spec, config, world, card) / 3600
    return f"{stage.name or 'stage'}: {config.steps:,} steps, {tokens / 1e9:,.3f} B tokens, {few(hours, 1)} hours"


def check_names(config: TrainConfig) -> None:
    """Refuse a dispatcher or an expert backend that does not exist; without this check it would count as a free one."""
    plugin.load("training.dispatch", config.mesh.dispatcher)
    capabilities(config.model.expert_backend)


def of_frozen(spec: DenseSpec | MoESpec, config: TrainConfig) -> str:
    """Return a sentence if frozen weights change their dtype in memory, or if they could take half; else ""."""
    names = [name for name, _ in whole_on_meta(spec, config).named_parameters()]
    if len(set[str]().union(*(learning(stage.config.optim, names) for stage in stages_of(config)))) == len(names):
        return ""
    held = held_in(config.model, spec)
    if held == torch.float32 and config.model.computes() == "bfloat16" and not config.model.frozen:
        return f"frozen weights stay float32, because the checkpoint is {spec.dtype}; model.frozen=bfloat16 rounds them"
    if held == torch.bfloat16 and spec.dtype != "bfloat16":
        return f"frozen weights are rounded to bfloat16: the checkpoint is {spec.dtype}"
    return ""


def of_bench(file: str, words: list[str], asked: EstimateConfig, card: hardware.Hardware | None) -> str:
    """Return the table of a config of `upcycle bench`, which gives the model by its sizes and has its own routing."""
    from training.estimating import bench  # slow: it imports all of training

    row = read(bench.BenchConfig, file, words, TRAIN)
    if row.stack or asked.seen or asked.islands:
        raise ValueError(
            "a bench config allows no estimate with stack, seen or islands; leave them out to plan its whole steps"
        )
    spec = bench.spec_of(row)
    check(row.mesh, asked.gpus, spec, row.data.sequence)
    config = row.run(row.micro_batch or max(1, row.batch // data_ranks(row.mesh, asked.gpus)))
    check_names(config)
    if card is None:
        return table(spec, config, asked.gpus)
    balanced = row.routing == "balanced"
    held = row.weights or ModelConfig().computes()
    half = f"The memory is that of float32 weights; the {held} weights of this config take half of it."
    half *= held != "float32"
    try:
        found = clocked(spec, config, asked, card, routing=Routing(0.0 if balanced else RANDOM, in_turn=balanced))
    except ValueError as error:
        raise ValueError(f"{error}. {half}" if half else str(error)) from error
    return f"{found}\n{half}" if half else found


def estimate_words(file: str, words: list[str]) -> str:
    """Return the tables of a config of training or of `upcycle bench`, from a command's words."""
    asked, rest = split(words)
    if "architecture" in (strict.read_yaml(find(file, TRAIN)) if file else {}):
        return of_bench(file, rest, asked, hardware.read(asked.hardware) if asked.hardware else None)
    return estimate_run(read_config(file, rest), asked)


def estimate_run(config: TrainConfig, asked: EstimateConfig) -> str:
    """Return the tables of a run: its memory, or with `hardware` its seconds, hours and money."""
    check_asked(asked)
    card = hardware.read(asked.hardware) if asked.hardware else None
    config = replace(config, model=replace(config.model, dtype=config.model.computes(config.device)))
    if asked.islands:  # the memory is that of one island
        config = replace(config, islands=replace(config.islands, local=0, join=config.islands.join or "server:29600"))
    with source(config) as origin:
        check(config.mesh, asked.gpus, origin.spec, config.data.sequence)
        auto, least = not config.micro_batch, 1.0  # without a card nothing is known to fit
        config = sized(config, origin.spec, asked.gpus, card.memory * 1e9 if card else least)
        stages = stages_of(config)
        for stage in stages:
            check(config.mesh, asked.gpus, origin.spec, stage.config.data.sequence)
        check_optim(config, origin.spec)
        check_names(config)
        teacher = None
        for asking in [stage.config for stage in stages if stage.config.teacher.asked][:1]:
            with taught_by(asking) as its_origin:
                teacher = check_teacher(its_origin, origin.spec)
        said = [of_frozen(origin.spec, config)]
        if auto:
            why = f"the most that fits {card.memory:g} GB" if card else "the least; hardware=h100 says what fits"
            said.append(f"micro_batch={config.micro_batch}: {why}")
        if origin.dense.carried is not None:
            if card is not None:
                raise ValueError(
                    f"hardware={asked.hardware} predicts the seconds of our own decoder only, and transformers' own "
                    f"code computes {origin.dense.family}; leave hardware out"
                )
            said.append(
                f"transformers' own code computes {origin.dense.family}: `activations` counts only what attention and "
                "experts keep, and `loss` leaves out that all logits are in memory"
            )
        if card is None:
            said.append(table(origin.spec, config, asked.gpus, teacher=teacher))
        if asked.islands:
            said.append("\n" + islands.table(origin.spec, config, asked.islands, asked.link))
        if card is not None:
            said += timed(origin, config, asked, card, teacher)
        return "\n".join(filter(None, said))


def timed(
    origin: Origin, config: TrainConfig, asked: EstimateConfig, card: hardware.Hardware, teacher: DenseSpec | None
) -> Iterator[str]:
    """Yield the table of seconds, each stage's hours, and the losses that the law of upcycling expects."""
    stages = stages_of(config)
    longest = max(stages, key=lambda stage: stage.config.steps * stage.config.batch).config
    yield clocked(origin.spec, longest, asked, card, teacher=teacher, whole=config)
    for stage in stages if len(stages) > 1 else []:
        yield lasting(stage, origin.spec, asked.gpus, card)
    if asked.seen and not refused(longest, asked.gpus):
        own = seconds_of(origin.spec, longest, asked.gpus, card)
        rate = longest.batch * longest.data.sequence / own / asked.gpus
        yield advised(origin, longest.data.sequence, asked.budget, asked.seen, rate)
