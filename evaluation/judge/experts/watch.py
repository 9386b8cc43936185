"""Watch a model's routers while it reads text: count their choices, and try each layer with fewer experts.

C domains, L MoE layers, N experts = E copies x G parts, K chosen a token, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training.experts import Backend, ExpertFunction
from training.model.decoder import Decoder
from training.model.moe import MoE, Router, Routing
from training.optim.loads import coherence, expert_counts, token_entropy


class Watch:
    """Count the choices of a model's routers, in the place of each block's `balance` (balance.py)."""

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
        """Count a block's routing and return it unchanged; `number` counts MoE layers."""
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
        """Add up the norms of the experts' outputs, each times its weight, and return the outputs unchanged."""
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
    """Count the choices of one domain, one sequence at a time, so that there is no padding to count."""
    with Watch(model, granularity) as watch:
        for row_S in token_BS:
            model.hidden(row_S[None])
    return watch


class Fewer:
    """Compare each block with itself when it has only the experts `kept`; leave the model's own output unchanged."""

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
        """Return (error, gain, cosine) of each block, as in Estimate."""
        out = []
        for dot, want, y in self.sums_L3.tolist():
            square = max(want, 1e-300)
            error = math.sqrt(max(y - 2 * dot + want, 0.0) / square)
            out.append((error, dot / square, dot / math.sqrt(square * max(y, 1e-300))))
        return out


def router_of(block: MoE, kept: Sequence[int]) -> Router:
    """Return the block's router with only the experts `kept`."""
    spec = replace(block.spec, widths=tuple(block.spec.widths[i] for i in kept))
    router = Router(spec).to(block.router.weight.device)
    router.register_parameter("weight", torch.nn.Parameter(block.router.weight.detach()[list(kept)]))
    router.register_buffer("bias", None if block.router.bias is None else block.router.bias[list(kept)])
    return router


@torch.no_grad()
def pruned(
    model: Decoder, domains: Iterable[Tensor], kept: Sequence[Sequence[int]]
) -> list[tuple[float, float, float]]:
    """Return (error, gain, cosine) of each block with only the experts `kept`."""
    with Fewer(model, kept) as fewer:
        for row_S in (row_S for token_BS in domains for row_S in token_BS):
            model.hidden(row_S[None])
    return fewer.found()
