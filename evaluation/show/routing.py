"""Measure how a model uses its experts on texts, and how far they have come from the dense FFN they were copied from.

`upcycle routing --help` says what each number means. C domains, L MoE layers, N experts = E copies x G parts, K chosen
a token, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.ask import load
from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.experts import Backend, ExpertFunction
from training.model.decoder import Decoder
from training.model.lora import merge
from training.model.moe import MoE, Router, Routing
from training.optim.loads import coherence, expert_counts, token_entropy
from upcycle.arch.spec import MoESpec
from upcycle.converting import grow
from upcycle.io.checkpoint import Checkpoint
from upcycle.text import tokens as text

PAIRS = 64  # experts up to which the table of all pairs is written; of more, only the STRONGEST pairs
STRONGEST = 12


@dataclass(frozen=True)
class RoutingConfig:
    checkpoint: str = ""  # a folder or hub id with experts, or a training run's folder
    texts: tuple[str, ...] = ()  # .txt, .jsonl or .jsonl.zst; a domain each, named by the file
    start: str = ""  # the converted folder that training began with, or the folder of a run that upcycled as it loaded
    # parts a dense FFN was cut into; 0: what the checkpoint's or start's upcycle.json says, or start's config, else 1
    granularity: int = 0
    tokens: int = 16384  # of each text, at most
    length: int = 512  # tokens a sequence
    keep: int = 0  # measure also what is lost if each layer keeps so many experts, the most salient; 0: do not
    compute: str = "float32"  # dtype of activations: float32 | bfloat16 | float64
    output: str = "routing.json"  # the file to write


# ---- counting


class Watch:
    """Counts what the routers of a model choose. Within, it takes the place of each block's `balance` (balance.py)."""

    def __init__(self, model: Decoder, granularity: int) -> None:
        self.blocks = [(int(n), layer.ffn) for n, layer in model.layers.items() if isinstance(layer.ffn, MoE)]
        spec = self.blocks[0][1].spec
        self.experts, self.top_k, self.granularity = spec.experts, spec.top_k, granularity
        size, device = len(self.blocks), self.blocks[0][1].router.weight.device
        self.count_LN = torch.zeros(size, self.experts, dtype=torch.int64, device=device)
        self.pair_LNN = torch.zeros(size, self.experts, self.experts, dtype=torch.float64, device=device)
        # sums over tokens: 1, whole groups, router entropy, whole, missing, doubled
        self.sums_L6 = torch.zeros(size, 6, dtype=torch.float64, device=device)
        self.norm_LN = torch.zeros(size, self.experts, dtype=torch.float64, device=device)

    def see(self, number: int, routing: Routing) -> Routing:
        """Counts a block's routing and returns it unchanged; `number` is the block's, among MoE layers."""
        expert_TK = routing.expert_TK
        self.count_LN[number] += expert_counts(expert_TK, self.experts)
        chosen_TN = torch.zeros_like(routing.scores_TN, dtype=torch.float32).scatter_(1, expert_TK, 1.0)
        self.pair_LNN[number] += (chosen_TN.T @ chosen_TN).double()
        chosen_TEG = chosen_TN.view(len(chosen_TN), -1, self.granularity)
        whole_T = (chosen_TEG.amax(2) == chosen_TEG.amin(2)).all(1)
        shares_TN = routing.scores_TN / routing.scores_TN.sum(-1, keepdim=True)
        means = [torch.ones_like(whole_T).double().mean(), whole_T.double().mean(), token_entropy(shares_TN).double()]
        self.sums_L6[number] += len(expert_TK) * torch.stack([*means, *coherence(expert_TK, self.granularity)])
        return routing

    def weigh(self, number: int, compute: ExpertFunction, x_RD: Tensor, *given: Any) -> Tensor:
        """Adds up the norms of what the experts give, each times its weight, and returns it unchanged."""
        y_RD, count_E = compute(x_RD, *given), given[1]
        owner_R = torch.repeat_interleave(torch.arange(self.experts, device=count_E.device), count_E)
        self.norm_LN[number].index_add_(0, owner_R, y_RD[: len(owner_R)].double().norm(dim=1))
        return y_RD

    def __enter__(self) -> Watch:
        self.before = [(block.balance, block.experts.backend) for _, block in self.blocks]
        for number, (_, block) in enumerate(self.blocks):
            block.balance = partial(self.see, number)
            block.experts.backend = Backend(partial(self.weigh, number, block.experts.backend.compute))
        return self

    def __exit__(self, *error: object) -> None:
        for (_, block), (balance, backend) in zip(self.blocks, self.before, strict=True):
            block.balance, block.experts.backend = balance, backend


@torch.no_grad()
def count(model: Decoder, token_BS: Tensor, granularity: int) -> Watch:
    """Counts of one domain's choices, a sequence at a time: nothing is padded, so no padding is counted."""
    with Watch(model, granularity) as watch:
        for row_S in token_BS:
            model.hidden(row_S[None])
    return watch


class Fewer:
    """Compares each block with itself when it has the experts `kept` alone; does not change what the model computes."""

    def __init__(self, model: Decoder, kept: Sequence[Sequence[int]]) -> None:
        self.blocks = [layer.ffn for layer in model.layers.values() if isinstance(layer.ffn, MoE)]
        # sums over tokens of y.want, want.want, y.y
        self.sums_L3 = torch.zeros(len(self.blocks), 3, dtype=torch.float64, device=self.blocks[0].router.weight.device)
        self.hooks = [
            block.register_forward_hook(partial(self.compare, number, router_of(block, experts), experts))
            for number, (block, experts) in enumerate(zip(self.blocks, kept, strict=True))
        ]

    def compare(
        self, number: int, router: Router, kept: Sequence[int], block: MoE, given: tuple[Tensor, ...], out: Tensor
    ) -> None:
        x_TD, want_TD = given[0].flatten(0, 1), out.flatten(0, 1).double()
        routing = router(x_TD)
        expert_TK = torch.tensor(kept, device=x_TD.device)[routing.expert_TK]
        y_TD = block.routed(x_TD, routing.weight_TK, expert_TK).double()
        self.sums_L3[number] += torch.stack([(y_TD * want_TD).sum(), want_TD.square().sum(), y_TD.square().sum()])

    def __enter__(self) -> Fewer:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def found(self) -> list[tuple[float, float, float]]:
        """(error, gain, cosine) of each block, as Estimate has them."""
        out = []
        for dot, want, y in self.sums_L3.tolist():
            square = max(want, 1e-300)
            error = math.sqrt(max(y - 2 * dot + want, 0.0) / square)
            out.append((error, dot / square, dot / math.sqrt(square * max(y, 1e-300))))
        return out


def router_of(block: MoE, kept: Sequence[int]) -> Router:
    """The router that the block has when only the experts `kept` are left."""
    spec = replace(block.spec, widths=tuple(block.spec.widths[i] for i in kept))
    router = Router(spec).to(block.router.weight.device)
    router.register_parameter("weight", torch.nn.Parameter(block.router.weight.detach()[list(kept)]))
    router.register_buffer("bias", None if block.router.bias is None else block.router.bias[list(kept)])
    return router


@torch.no_grad()
def pruned(
    model: Decoder, domains: Iterable[Tensor], kept: Sequence[Sequence[int]]
) -> list[tuple[float, float, float]]:
    with Fewer(model, kept) as fewer:
        for row_S in (row_S for token_BS in domains for row_S in token_BS):
            model.hidden(row_S[None])
    return fewer.found()


# ---- what the counts say


def specialisation(count_CN: Tensor) -> float | None:
    """Mutual information of domain and expert, every domain weighing the same, / its largest value log C."""
    if len(count_CN) < 2:
        return None
    share_CN = count_CN.double() / count_CN.sum(1, keepdim=True)
    within = torch.special.entr(share_CN).sum(1).mean()
    return max(0.0, float(torch.special.entr(share_CN.mean(0)).sum() - within) / math.log(len(count_CN)))


def together(pair_NN: Tensor, tokens: float) -> Tensor:
    """How often two are chosen together / were choices independent; nan for an expert never chosen, and with itself."""
    chance_N = pair_NN.diagonal() / tokens
    lift_NN = (pair_NN / tokens) / (chance_N[:, None] * chance_N[None, :])
    return lift_NN.fill_diagonal_(math.nan)


def entropy(count_N: Tensor) -> float:
    share_N = count_N.double() / count_N.sum()
    return float(torch.special.entr(share_N).sum()) / math.log(max(len(count_N), 2))


def chance_of_whole(copies: int, granularity: int, top_k: int) -> float:
    """How often K experts drawn at random are whole groups."""
    if top_k % granularity:
        return 0.0
    return math.comb(copies, top_k // granularity) / math.comb(copies * granularity, top_k)


# ---- how far the experts have come


def spread(block: MoE, granularity: int) -> list[float]:
    """Each expert's distance from the mean of the copies of its part, relative to that mean."""
    experts: int = block.spec.experts
    distance_N = torch.zeros(experts, dtype=torch.float64)
    for part in range(granularity):
        squares_E, mean_square = torch.zeros(experts // granularity, dtype=torch.float64), 0.0
        for stacked in block.experts.parameters():
            copies = stacked.detach()[part::granularity].double().flatten(1)
            mean = copies.mean(0)
            squares_E += (copies - mean).square().sum(1).cpu()
            mean_square += float(mean.square().sum())
        distance_N[part::granularity] = (squares_E / mean_square).sqrt()
    return [float(d) for d in distance_N]


def moved(model: Decoder, start: Origin) -> dict[str, float]:
    """Relative distance of each expert and router to what it was at `start`, by role; a tensor on disk at a time."""
    now = layout.views(model)
    difference: dict[str, float] = {}
    before: dict[str, float] = {}
    for stored in start.tensors:
        roles = [role for role, _ in stored.roles]
        if not any(".experts." in role or role.endswith("router.weight") for role in roles):
            continue
        if any(role not in now for role in roles):
            raise ValueError(
                f"start has {stored.name}, which the checkpoint has not; give the folder that it came from"
            )
        for role, part in zip(roles, layout.cut(start.read(stored.name), stored, now), strict=True):
            owner = role.rsplit(".", 2 if ".experts." in role else 1)[0]
            was, is_ = part.flatten().double(), now[role].cpu().flatten().double()
            difference[owner] = difference.get(owner, 0.0) + float((is_ - was).square().sum())
            before[owner] = before.get(owner, 0.0) + float(was.square().sum())
    if not difference:
        raise ValueError("start has no experts; give the converted folder, or the run that upcycled as it loaded")
    return {owner: math.sqrt(square / before[owner]) for owner, square in difference.items()}


# ---- a checkpoint and its texts, to the table


@contextmanager
def started(source: str) -> Iterator[Origin]:
    """Opens what training began with: a folder or hub id, or what a run upcycled as it loaded."""
    run = Path(source)
    made = standalone.upcycled(run)
    # text=True: a run may have measured its training data, which its model's config does not name, and kept what it
    # found. How its routers began is decided in `made`
    begun = layout.online(made, standalone.measured_before(run), text=True) if made else layout.opened(source)
    with begun as origin:
        yield origin


def analyse(config: RoutingConfig) -> dict[str, Any]:
    if not config.texts:
        raise ValueError("there is no text to route; name files, for instance routing ./moe book.txt code.jsonl")
    run, step = standalone.training_run(Path(config.checkpoint))
    with load.origin_of(config.checkpoint, run) as origin:
        if origin.spec is origin.dense:
            raise ValueError(f"{config.checkpoint} is a dense model and routes nothing; give one with experts")
        with torch.device("meta"):
            model = Decoder(origin.spec, compute=getattr(torch, config.compute))
            if run is not None:
                standalone.attach_adapters(model, run)
            else:  # a run's float32 masters stay as they are; modules cast for themselves
                load.narrow(model, getattr(torch, config.compute))
        model = model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
        load.fill(model, origin, run, step)
        merge(model)
    assert isinstance(origin.spec, MoESpec) and model.moe is not None
    stated, distances = origin.spec.granularity, None
    if config.start:
        with started(config.start) as start:
            distances = moved(model, start)
            assert isinstance(start.spec, MoESpec)  # moved found experts in it
            stated = max(stated, start.spec.granularity)
    parts = config.granularity or stated
    if model.moe.experts % parts:
        raise ValueError(f"granularity={parts} must divide the {model.moe.experts} experts")
    spec = model.moe
    if config.keep and not spec.top_k <= config.keep < spec.experts:
        raise ValueError(
            f"keep={config.keep} of {spec.experts} experts, of which a token takes {spec.top_k}; write "
            f"keep={spec.top_k} to {spec.experts - 1}"
        )
    domains = {}
    for path in config.texts:
        name = Path(path).name.split(".")[0]
        if name in domains:
            raise ValueError(f"two texts are called {name}; a domain is named by its file, so rename one")
        domains[name] = batches(origin, path, config)
    device = next(model.parameters()).device
    domains = {name: token_BS.to(device) for name, token_BS in domains.items()}
    watches = {name: count(model, token_BS, parts) for name, token_BS in tqdm(domains.items(), "domains", delay=2)}
    found = describe(model, watches, parts, distances)
    if config.keep:
        kept = [grow.kept(row["saliency"], config.keep) for row in found["layers"]]
        for row, lost in zip(found["layers"], pruned(model, domains.values(), kept), strict=True):
            row["pruned"] = lost
    return found | {
        "keep": config.keep,
        "source": "" if run is not None else fingerprint(config.checkpoint),
        "checkpoint": config.checkpoint,
        "start": config.start,
        "tokens": {name: token_BS.numel() for name, token_BS in domains.items()},
    }


def fingerprint(source: str) -> str:
    with Checkpoint.open(source) as checkpoint:
        return checkpoint.fingerprint()


def batches(origin: Origin, path: str, config: RoutingConfig) -> Tensor:
    """[B, S] ids: whole sequences from the front of a text."""
    folder = next((file.parent for file in origin.files if file.name == "tokenizer.json"), None)
    if folder is None:
        raise ValueError(f"{config.checkpoint} has no tokenizer.json, which turns text into tokens; add the model's")
    encode: Callable[[str], list[int]] = text.encoder(folder)
    ids = list(islice((token for document in text.documents([path]) for token in encode(document)), config.tokens))
    length = min(config.length, origin.dense.context, len(ids))
    if length < 1:
        raise ValueError(f"{path} has no text to route, or tokens={config.tokens}; both must be there")
    if max(ids) >= origin.dense.vocab:
        raise ValueError(f"the tokenizer gives id {max(ids)}, the model has {origin.dense.vocab} embeddings")
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


def describe(
    model: Decoder, watches: dict[str, Watch], granularity: int, distances: dict[str, float] | None
) -> dict[str, Any]:
    """The measurements, as JSON can hold them."""
    first = next(iter(watches.values()))
    count_CLN = torch.stack([watch.count_LN.cpu() for watch in watches.values()])
    pair_LNN = torch.stack([watch.pair_LNN.cpu() for watch in watches.values()]).sum(0)
    sums_L6 = torch.stack([watch.sums_L6.cpu() for watch in watches.values()]).sum(0)
    norm_LN = torch.stack([watch.norm_LN.cpu() for watch in watches.values()]).sum(0)
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
    return {
        "kind": "routing",
        "experts": first.experts,
        "top_k": first.top_k,
        "granularity": granularity,
        "chance_of_whole_groups": chance_of_whole(first.experts // granularity, granularity, first.top_k),
        "layers": rows,
        "load": {name: plain(loads(watch.count_LN.cpu())) for name, watch in watches.items()},
        "together": tables,
    }


def loads(count_LN: Tensor) -> Tensor:
    return count_LN / count_LN.double().mean(1, keepdim=True)


def strongest(lift_NN: Tensor) -> list[tuple[int, int, float]]:
    """The pairs that are most often together beyond chance: (expert, expert, lift)."""
    upper = lift_NN.nan_to_num(0.0).triu(1)
    found = upper.flatten().topk(min(STRONGEST, upper.numel()))
    size = len(lift_NN)
    return [
        (at // size, at % size, value)
        for at, value in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        if value > 0
    ]


def plain(table: Tensor) -> list[Any]:
    """Nested lists of numbers with four digits, None for nan."""

    def cell(value: Any) -> Any:
        if isinstance(value, list):
            return [cell(v) for v in value]
        return None if math.isnan(value) else float(f"{value:.4g}")

    return [cell(row) for row in table.tolist()]


def table(found: dict[str, Any]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "fullest/mean": lambda r: r["max_over_mean"],
        "entropy": lambda r: r["entropy"],
        "unused": lambda r: r["unused"],
        "specialisation": lambda r: r["specialisation"],
        "whole groups": lambda r: r.get("whole_groups"),
        "whole": lambda r: r.get("whole"),
        "missing": lambda r: r.get("missing"),
        "doubled": lambda r: r.get("doubled"),
        "spread": lambda r: sum(r["spread"]) / len(r["spread"]),
        "pruned": lambda r: r["pruned"][0] if "pruned" in r else None,
        "moved": lambda r: sum(r["moved"]) / len(r["moved"]) if "moved" in r else None,
        "router moved": lambda r: r.get("router_moved"),
    }
    shown = {name: get for name, get in columns.items() if get(found["layers"][0]) is not None}
    lines = ["layer  " + "  ".join(shown)]
    for row in found["layers"]:
        values = {name: get(row) for name, get in shown.items()}
        cells = (("" if value is None else f"{value:.4g}").rjust(len(name)) for name, value in values.items())
        lines.append(f"{int(row['layer']):>5}  " + "  ".join(cells))
    return "\n".join(lines)
