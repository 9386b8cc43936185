"""Make a router row for a part: positive for tokens like those of its documents, negative for general text.

The row is Fisher's discriminant between the router's inputs on both texts. A router has no bias, so the threshold lies
along the direction in which all tokens are near 1. Held-back general text sets it: at most MARGIN of its tokens may
leave the anchor, whose logit is 0.

The first token of a text is unlike all others: later tokens attend to it, and its vector is nearly the same in all
texts. A part that took it would change every token after it, so first tokens stay too.

Shapes: T tokens, D hidden size, F first tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 0.03  # share of general tokens that may leave the anchor in a layer; 0.01 and 0.1 taught less (one seed)
FIRST = 0.01  # share of the first tokens of general texts that may leave it
LEAST = 512  # tokens of each text
HELD = 4  # one of so many tokens is held back for the threshold
RIDGE = 1e-2  # of the mean variance, added to each direction's
SPREAD = 1.0  # standard deviation of general tokens' logits, so that rows of several parts can be compared
RAISES = 500
RAISE = 0.02  # step of the threshold, in that unit, where rounding the row let more tokens through


@torch.no_grad()
def row(general_TD: Tensor, own_TD: Tensor, first_FD: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[float, float]]:
    """Return a float32 row whose numbers are exact in `dtype`, and the shares of held-back general tokens and of
    held-back tokens of the part that leave the anchor. `first_FD` are the first tokens of general texts; the others
    hold no first tokens. The row is zero, and all stay, where no threshold holds."""
    if min(len(general_TD), len(own_TD)) < LEAST:
        raise ValueError(
            f"a part's rows are measured on {len(general_TD)} tokens of general text and {len(own_TD)} of its "
            f"documents; give at least {LEAST} of each (calibration.tokens is of both)"
        )
    seen, held = zip(*(halves(x_TD.double()) for x_TD in (general_TD, own_TD)), strict=True)
    means, first_FD = [x_TD.mean(0) for x_TD in seen], first_FD.double()
    share = len(seen[0]) / sum(map(len, seen))
    squares = [square(x_TD) for x_TD in seen]
    centred = [square_DD - torch.outer(mean_D, mean_D) for square_DD, mean_D in zip(squares, means, strict=True)]
    whole_DD, whole_D, apart_DD = (own.lerp(general, share) for general, own in (squares, means, centred))
    # first tokens count as much as all others together
    away_D = solved(apart_DD + square(first_FD - means[0]), means[1] - means[0])
    one_D = solved(whole_DD + square(first_FD), whole_D + first_FD.mean(0))
    away_D = away_D * (SPREAD / (seen[0] @ away_D).std().clamp_min(1e-12))
    general_T, constant_T = held[0] @ away_D, (held[0] @ one_D).clamp_min(0.1)
    price = torch.quantile(general_T / constant_T, 1 - MARGIN)
    for _ in range(RAISES):
        found_D = (away_D - price * one_D).to(dtype).double()
        left = [float((x_TD @ found_D > 0).double().mean()) for x_TD in held]
        if left[0] <= MARGIN and float((first_FD @ found_D > 0).double().mean()) <= FIRST:
            return found_D.float(), (left[0], left[1])
        price += RAISE * SPREAD
    return torch.zeros_like(away_D, dtype=torch.float32), (0.0, 0.0)  # no direction is near 1 for enough tokens


def halves(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens to fit on, and those held back: the last ones, which are other documents."""
    last = len(x_TD) // HELD
    return x_TD[:-last], x_TD[-last:]


def square(x_TD: Tensor) -> Tensor:
    """Return the second moments."""
    return x_TD.T @ x_TD / len(x_TD)


def solved(square_DD: Tensor, right_D: Tensor) -> Tensor:
    """Divide by a matrix of second moments, with a ridge."""
    ridge_DD = torch.diag(RIDGE * square_DD.diagonal().mean().expand(len(square_DD)))
    # one small system: a GPU would first load its library of solvers
    found_D: Tensor = torch.linalg.solve((square_DD + ridge_DD).cpu(), right_D.cpu()).to(right_D.device)
    return found_D
