"""Measure how a model uses its experts on text, and how far they have moved from the dense FFN that they copy.

Every text is a domain. `upcycle routing --help` explains each measure.
C domains, L MoE layers, N experts = E copies x G parts, K chosen a token, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.ask import load
from evaluation.judge.experts.choices import choices, cut
from evaluation.judge.experts.watch import Watch, count, pruned
from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.model.decoder import Decoder
from training.model.lora import merge
from training.model.moe import MoE
from upcycle.arch.spec import MAX_EXPERTS, MoESpec
from upcycle.config.values import LENGTH, TOKENS, at_least, check_values, one_of
from upcycle.converting import grow
from upcycle.io import publish, strict
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.disk import check_own
from upcycle.io.strict import Count, Range
from upcycle.text import tokens as text

PAIRS = 64  # up to this many experts the table of all pairs is written; above it only the STRONGEST pairs
STRONGEST = 12
SHOWN = 256  # tokens of a text that a report colours
BASE = "(base)"  # in place of a part's name, for choices of the anchor
DTYPES = ("float32", "bfloat16", "float64")
Experts = Annotated[int, Range(1, MAX_EXPERTS)]
Cells = list[list[float | None]]


@dataclass(frozen=True)
class RoutingConfig:
    ELSEWHERE: ClassVar = {"compute": "dtype", "length": "sequence"}

    checkpoint: str = ""  # a folder or hub id of an MoE model, or a training run's folder
    texts: tuple[str, ...] = ()  # .txt, .jsonl or .jsonl.zst; each file is a domain with the file's name
    start: str = ""  # the folder that training began with, or a run that upcycled its model as it loaded
    # slices of a dense FFN; 0: as the checkpoint's or start's upcycle.json or start's config says, else 1
    granularity: int = 0
    tokens: int = 16384  # tokens of each text, at most
    sequence: int = 512  # tokens of a sequence
    keep: int = 0  # also measure the loss if each layer keeps only this many experts, the most salient; 0: do not
    dtype: str = "float32"  # dtype of activations: float32 | bfloat16 | float64
    output: str = "routing.json"  # the file to write

    def __post_init__(self) -> None:
        rules = {"tokens": at_least(1, most=TOKENS), "sequence": at_least(1, most=LENGTH)}
        rules["dtype"] = one_of(DTYPES)
        check_values(self, "", rules | {"granularity keep": at_least(0, most=MAX_EXPERTS)})


def routing(config: RoutingConfig) -> dict[str, Any]:
    """Measure, write the file, and return the measurements."""
    check_own(Path(config.output), rb'\A\{"kind": "routing"', "upcycle routing")
    found = measure(config)
    publish.write_own(Path(config.output), (json.dumps(found | {"config": asdict(config)}) + "\n").encode())
    return found


def measure(config: RoutingConfig) -> dict[str, Any]:
    """Return the measurements as JSON values."""
    if not config.texts:
        raise ValueError("no text is given; name files, for instance routing ./moe book.txt code.jsonl")
    model, origin, run = opened(config)
    assert isinstance(origin.spec, MoESpec) and model.moe is not None
    stated, distances = origin.spec.granularity, None
    if config.start:
        with started(config.start) as start:
            distances = moved(model, start)
            assert isinstance(start.spec, MoESpec)  # moved() has found experts in it
            stated = max(stated, start.spec.granularity)
    spec, parts = model.moe, config.granularity or stated
    if spec.experts % parts:
        raise ValueError(f"granularity={parts} must divide the {spec.experts} experts")
    if config.keep and not spec.top_k <= config.keep < spec.experts:
        raise ValueError(
            f"keep is {config.keep}, and the model has {spec.experts} experts and a token takes {spec.top_k}; write "
            f"keep={spec.top_k} to {spec.experts - 1}"
        )
    device, domains = next(model.parameters()).device, dict[str, Tensor]()
    for path in config.texts:
        name = Path(path).name.split(".")[0]
        if name in domains:
            raise ValueError(f"two texts are called {name}, and a domain has its file's name; rename one")
        domains[name] = batches(origin, path, config).to(device)
    watches = {name: count(model, token_BS, parts) for name, token_BS in tqdm(domains.items(), "domains", delay=2)}
    found = describe(watches, parts, distances)
    if config.keep:
        kept = [grow.kept(row["saliency"], config.keep) for row in found["layers"]]
        for row, lost in zip(found["layers"], pruned(model, domains.values(), kept), strict=True):
            row["pruned"] = lost
    if spec.parts:
        found["shown"] = {Path(path).name.split(".")[0]: coloured(model, origin, path) for path in config.texts}
    return found | {
        "keep": config.keep,
        "source": "" if run is not None else fingerprint(config.checkpoint),
        "checkpoint": config.checkpoint,
        "start": config.start,
        "tokens": {name: token_BS.numel() for name, token_BS in domains.items()},
    }


# ---- a checkpoint and its texts


def opened(config: RoutingConfig, device: str = "") -> tuple[Decoder, Origin, Path | None]:
    """Load the checkpoint; return (the model, its origin, its training run or None). `device`: "" is a GPU if there is
    one."""
    run, step = standalone.training_run(Path(config.checkpoint))
    dtype = getattr(torch, config.dtype)
    with load.origin_of(config.checkpoint, run) as origin:
        if origin.spec is origin.dense:
            raise ValueError(f"{config.checkpoint} is a dense model without experts; give an MoE model")
        with torch.device("meta"):
            model = Decoder(origin.spec, compute=dtype)
            if run is not None:
                standalone.attach_adapters(model, run)
            else:  # a run's float32 masters stay as they are; each module casts its own weights
                load.narrow(model, dtype)
        model = model.to_empty(device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
        load.fill(model, origin, run, step)
        merge(model)
    return model, origin, run


@contextmanager
def started(source: str) -> Iterator[Origin]:
    """Open the model that training began with: a folder, a hub id, or the model that a run upcycled as it loaded."""
    run = Path(source)
    made = standalone.upcycled(run)
    # text=True: the run may have measured its training data, which the model's config does not name, and kept the
    # result; `made` decides how its routers began
    begun = layout.online(made, standalone.measured_before(run), text=True) if made else layout.opened(source)
    with begun as origin:
        yield origin


def coloured(model: Decoder, origin: Origin, path: str) -> list[tuple[str, str, float]]:
    """Return the first tokens of a text: (piece, the part that most of its choices outside of the base's own FFN go to,
    the share of all its choices that go there)."""
    assert isinstance(origin.spec, MoESpec)
    spec, folder = origin.spec, next(file.parent for file in origin.files if file.name == "tokenizer.json")
    first = next(iter(text.documents([path])))[: SHOWN * 20]
    ids, pieces = cut(text.load_tokenizer(folder), first, min(SHOWN, origin.dense.context))
    device = next(model.parameters()).device
    owner = [name for name, copies in ((BASE, 1), *spec.parts) for _ in range(copies * spec.granularity)]
    experts = [row["experts"] for row in choices(model, torch.tensor(ids, device=device))]
    found = []
    for token, piece in enumerate(pieces):
        chosen = [owner[expert] for layer in experts for expert in layer[token]]
        name = max(dict(spec.parts), key=chosen.count)
        found.append((piece, name, float(f"{chosen.count(name) / len(chosen):.3g}")))
    return found


def fingerprint(source: str) -> str:
    with Checkpoint.open(source) as checkpoint:
        return checkpoint.fingerprint()


def batches(origin: Origin, path: str, config: RoutingConfig) -> Tensor:
    """Return [B, S] ids: whole sequences from the beginning of a text."""
    folder = next((file.parent for file in origin.files if file.name == "tokenizer.json"), None)
    if folder is None:
        raise ValueError(f"{config.checkpoint} has no tokenizer.json, and text needs one; add the model's")
    encode: Callable[[str], list[int]] = text.encoder(folder)
    ids = list(islice((token for document in text.documents([path]) for token in encode(document)), config.tokens))
    length = min(config.sequence, origin.dense.context, len(ids))
    if length < 1:
        raise ValueError(f"{path} has no text, or tokens={config.tokens} is 0; give a text and tokens above 0")
    if max(ids) >= origin.dense.vocab:
        raise ValueError(f"the tokenizer gives id {max(ids)}, the model has {origin.dense.vocab} embeddings")
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


# ---- measures from the counts


def describe(watches: Mapping[str, Watch], granularity: int, distances: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the measurements over all domains, one row for each layer, and the load of each domain."""
    first = next(iter(watches.values()))
    count_CLN = torch.stack([watch.count_LN.cpu() for watch in watches.values()])
    pair_LNN, sums_L6, norm_LN = (
        torch.stack([getattr(watch, name).cpu() for watch in watches.values()]).sum(0)
        for name in ("pair_LNN", "sums_L6", "norm_LN")
    )
    rows, tables = [], []
    for number, (layer, block) in enumerate(first.blocks):
        count_N, (tokens, groups, undecided, *slices) = count_CLN[:, number].sum(0), sums_L6[number].tolist()
        lift_NN = together(pair_LNN[number], tokens)
        row: dict[str, Any] = {
            "layer": layer,
            "max_over_mean": float(count_N.max()) * first.experts / float(count_N.sum()),
            "entropy": entropy(count_N),
            "unused": int((count_N == 0).sum()),
            "router_entropy": undecided / tokens,
            "specialisation": specialisation(count_CLN[:, number]),
            "spread": spread(block, granularity),
            "pairs": strongest(lift_NN),
            "chosen": count_N.tolist(),
            "saliency": (norm_LN[number] / count_N.clamp_min(1)).tolist(),
        }
        if block.router.bias is not None:
            row["bias"] = (float(block.router.bias.min()), float(block.router.bias.max()))
        if 1 < granularity < first.experts:
            whole, missing, doubled = (total / tokens for total in slices)
            row |= {"whole_groups": groups / tokens, "whole": whole, "missing": missing, "doubled": doubled}
        if distances is not None:
            row["moved"] = [distances[f"layers.{layer}.experts.{i}"] for i in range(first.experts)]
            row["router_moved"] = distances[f"layers.{layer}.router"]
        rows.append(row)
        tables.append(plain(lift_NN) if first.experts <= PAIRS else None)
    named = shares_of_parts(first.blocks[0][1].spec, watches)
    return {
        "kind": "routing",
        "experts": first.experts,
        "top_k": first.top_k,
        "granularity": granularity,
        "chance_of_whole_groups": chance_of_whole(first.experts // granularity, granularity, first.top_k),
        "layers": rows,
        "load": {name: plain(loads(watch.count_LN.cpu())) for name, watch in watches.items()},
        "together": tables,
        **({"parts": named} if named else {}),
    }


def shares_of_parts(spec: MoESpec, watches: Mapping[str, Watch]) -> dict[str, dict[str, float]]:
    """Return for each domain the share of all choices that went to the base's own FFN and to each part."""
    if not spec.parts:
        return {}
    found = {}
    for domain, watch in watches.items():
        share_N, first = watch.count_LN.double().sum(0) / watch.count_LN.sum(), 0
        found[domain] = dict[str, float]()
        for name, copies in ((BASE, 1), *spec.parts):
            stop = first + copies * spec.granularity
            found[domain][name] = float(f"{float(share_N[first:stop].sum()):.4g}")
            first = stop
    return found


def loads(count_LN: Tensor) -> Tensor:
    return count_LN / count_LN.double().mean(1, keepdim=True)


def specialisation(count_CN: Tensor) -> float | None:
    """Return the mutual information of domain and expert, with equal weight for each domain, divided by its maximum log
    C."""
    if len(count_CN) < 2:
        return None
    share_CN = count_CN.double() / count_CN.sum(1, keepdim=True)
    within = torch.special.entr(share_CN).sum(1).mean()
    return max(0.0, float(torch.special.entr(share_CN.mean(0)).sum() - within) / math.log(len(count_CN)))


def together(pair_NN: Tensor, tokens: float) -> Tensor:
    """Return how often two experts are chosen together, divided by the rate of independent choices; nan for an expert
    that is never chosen, and for an expert with itself."""
    chance_N = pair_NN.diagonal() / tokens
    lift_NN = (pair_NN / tokens) / (chance_N[:, None] * chance_N[None, :])
    return lift_NN.fill_diagonal_(math.nan)


def entropy(count_N: Tensor) -> float:
    share_N = count_N.double() / count_N.sum()
    return float(torch.special.entr(share_N).sum()) / math.log(max(len(count_N), 2))


def chance_of_whole(copies: int, granularity: int, top_k: int) -> float:
    """Return how often K random experts are whole groups."""
    if top_k % granularity:
        return 0.0
    return math.comb(copies, top_k // granularity) / math.comb(copies * granularity, top_k)


def strongest(lift_NN: Tensor) -> list[tuple[int, int, float]]:
    """Return the pairs that are together most often compared with chance: (expert, expert, lift)."""
    upper = lift_NN.nan_to_num(0.0).triu(1)
    values, at = upper.flatten().topk(min(STRONGEST, upper.numel()))
    pairs = zip(at.tolist(), values.tolist(), strict=True)
    return [(place // len(lift_NN), place % len(lift_NN), value) for place, value in pairs if value > 0]


def plain(table: Tensor) -> list[Any]:
    """Return nested lists of numbers with four digits, None for nan."""

    def cell(value: Any) -> Any:
        if isinstance(value, list):
            return [cell(v) for v in value]
        return None if math.isnan(value) else float(f"{value:.4g}")

    return [cell(row) for row in table.tolist()]


# ---- how far the experts have moved


def spread(block: MoE, granularity: int) -> list[float]:
    """Return each expert's distance from the mean of its slice's copies, relative to that mean."""
    experts: int = block.spec.experts
    distance_N = torch.zeros(experts, dtype=torch.float64)
    for part in range(granularity):
        squares_E, mean_square = torch.zeros(experts // granularity, dtype=torch.float64), 0.0
        for stacked in block.experts.whole():
            copies = stacked.detach()[part::granularity].double().flatten(1)
            mean = copies.mean(0)
            squares_E += (copies - mean).square().sum(1).cpu()
            mean_square += float(mean.square().sum())
        distance_N[part::granularity] = (squares_E / mean_square).sqrt()
    return [float(d) for d in distance_N]


def moved(model: Decoder, start: Origin) -> dict[str, float]:
    """Return the relative distance of each expert and router from its value at `start`, by role; read one tensor at a
    time."""
    now = layout.views(model)
    difference: dict[str, float] = {}
    before: dict[str, float] = {}
    for stored in start.tensors:
        roles = [role for role, _ in stored.roles]
        if not any(".experts." in role or role.endswith("router.weight") for role in roles):
            continue
        if any(role not in now for role in roles):
            raise ValueError(f"start has {stored.name}, which the checkpoint lacks; give the folder that it came from")
        for role, part in zip(roles, layout.cut(start.read(stored.name), stored, now), strict=True):
            owner = role.rsplit(".", 2 if ".experts." in role else 1)[0]
            was, is_ = part.flatten().double(), now[role].cpu().flatten().double()
            difference[owner] = difference.get(owner, 0.0) + float((is_ - was).square().sum())
            before[owner] = before.get(owner, 0.0) + float(was.square().sum())
    if not difference:
        raise ValueError("start has no experts; give the converted folder, or the run that upcycled as it loaded")
    return {owner: math.sqrt(square / before[owner]) for owner, square in difference.items()}


# ---- the file and its text


class RoutedLayer(TypedDict):
    layer: Count
    max_over_mean: float
    entropy: float
    unused: Count
    specialisation: float | None
    spread: list[float]
    pairs: list[tuple[Count, Count, float]]
    whole_groups: NotRequired[float | None]
    whole: NotRequired[float | None]
    missing: NotRequired[float | None]
    doubled: NotRequired[float | None]
    moved: NotRequired[list[float]]
    router_moved: NotRequired[float]
    pruned: NotRequired[tuple[float, float, float]]


class Routed(TypedDict):
    """Hold the keys that we read from a file of `routing`."""

    kind: str
    experts: Experts
    top_k: Experts
    granularity: Experts
    chance_of_whole_groups: float
    layers: list[RoutedLayer]
    load: Mapping[str, Cells]
    together: list[Cells | None]
    parts: NotRequired[Mapping[str, Mapping[str, float]]]  # of a model with parts: domain -> name -> share of choices
    shown: NotRequired[Mapping[str, list[tuple[str, str, float]]]]  # domain -> (piece, part, share of its choices)
    tokens: Mapping[str, Count]
    checkpoint: str
    start: str


def read_routing(file: Path) -> dict[str, Any]:
    """Read a file of `routing`; raise a ValueError of one sentence for any other file."""
    try:
        value = strict.read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is not whole JSON ({error}); make it again with `upcycle routing`") from None
    if not isinstance(value, dict) or value.get("kind") != "routing":
        raise ValueError(f"{file} is not a file of `upcycle routing`; make one with that command")
    try:
        found: dict[str, Any] = strict.held(value, Routed, str(file))
        check_sizes(found, str(file))
    except ValueError as error:
        raise ValueError(f"{error}; make it again with `upcycle routing`") from None
    return found


def check_sizes(found: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError unless the tables have a row for each layer and a cell for each expert."""
    experts, layers = found["experts"], found["layers"]
    if not layers or not found["load"] or found["load"].keys() != found["tokens"].keys():
        raise ValueError(f"{where} has {len(layers)} layers and different domains in load and in tokens")
    of_layers = [*found["load"].values(), found["together"]]
    square = [table for table in found["together"] if table is not None]
    rows = [row for table in (*found["load"].values(), *square) for row in table]
    rows += [row[name] for row in layers for name in ("spread", "moved") if name in row]
    if any(len(table) != len(layers) for table in of_layers) or any(len(table) != experts for table in square):
        raise ValueError(f"{where} has tables whose sizes are not its {len(layers)} layers and {experts} experts")
    if any(len(row) != experts for row in rows):
        raise ValueError(f"{where} has rows whose length is not its {experts} experts")


Figure = Callable[[Mapping[str, Any]], float | None]
MEASURES: tuple[tuple[str, str, Figure, bool], ...] = (  # title, unit, value of a layer, axis from zero
    ("Fullest expert", "its load / the mean", lambda row: row["max_over_mean"], False),
    ("Entropy of the load", "1: balance", lambda row: row["entropy"], False),
    ("Unused experts", "of the layer", lambda row: row["unused"], True),
    ("Domain specialisation", "0: none, 1: whole", lambda row: row["specialisation"], True),
    ("Whole virtual groups", "share of tokens", lambda row: row.get("whole_groups"), True),
    ("Whole FFNs", "share of tokens", lambda row: row.get("whole"), True),
    ("Slices missing", "a token, of whole FFNs", lambda row: row.get("missing"), True),
    ("Slices doubled", "a token", lambda row: row.get("doubled"), True),
    ("Copies apart", "|expert − mean| / |mean|", lambda row: average(row["spread"]), True),
    ("Pruned", "error of the FFN", lambda row: row["pruned"][0] if "pruned" in row else None, True),
    ("Experts moved", "|now − start| / |start|", lambda row: average(row.get("moved", ())), True),
    ("Router moved", "|now − start| / |start|", lambda row: row.get("router_moved"), True),
)


def average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(found: Mapping[str, Any]) -> str:
    """Write the measurements as a table with a row for each layer."""
    shown = {title: get for title, _, get, _ in MEASURES if get(found["layers"][0]) is not None}
    lines = ["layer  " + "  ".join(shown)]
    for row in found["layers"]:
        values = {name: get(row) for name, get in shown.items()}
        cells = (("" if value is None else f"{value:.4g}").rjust(len(name)) for name, value in values.items())
        lines.append(f"{int(row['layer']):>5}  " + "  ".join(cells))
    for domain, shares in found.get("parts", {}).items():
        lines.append(f"{domain} goes to " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    return "\n".join(lines)
