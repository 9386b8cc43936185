"""The algebra of the rules, on tensors alone: what is sent and kept adds up, and the listings' slips do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from training.islands.rules import dense, dgs, diloco
from training.islands.sparse import Sparse, largest, rounded

SIZE, STEPS = 97, 200


def exact(value: Tensor) -> Tensor:
    return value


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(generator: torch.Generator, share: float = 0.1, size: int = SIZE) -> Sequence[int]:
    """How many of one segment's numbers are sent, another number each time, sometimes none and sometimes all."""
    roll = float(torch.rand((), generator=generator))
    return [0 if roll < 0.05 else size if roll > 0.95 else 1 + int(2 * share * size * roll)]


@pytest.mark.parametrize("gain", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("wire", [exact, rounded])
def test_what_was_sent_and_what_is_kept_are_all_that_was_learned(momentum: float, wire: dgs.Round, gain: float) -> None:
    """The gain is of what is sent: what is kept is what was learned, whole."""
    generator = draw(1)
    push = dgs.Push(torch.zeros(1, SIZE, dtype=torch.float64), momentum, wire, gain)
    sent, learned = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(STEPS):
        delta = torch.randn(1, SIZE, generator=generator, dtype=torch.float64)
        learned += delta[0]
        found = push.push(delta, some(generator))
        sent[found.index] += found.value
        assert (sent / gain + push.residual[0] - learned).abs().max() < 1e-12


@pytest.mark.parametrize("momentum", [0.3, 0.7])
def test_it_is_the_papers_samomentum(momentum: float) -> None:
    """u~ = m u + eta g; what is sent is u~; u is u~ where it was sent and u~ / m elsewhere; and in its letters
    sent + m / (1 - m) u = eta / (1 - m) sum g."""
    generator, eta, m = draw(2), 0.1, momentum
    u, total, sent = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
    push = dgs.Push(torch.zeros(1, SIZE, dtype=torch.float64), m, exact)
    for _ in range(STEPS):
        g = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        counts = some(generator)
        wide = m * u + eta * g
        mask = torch.zeros(SIZE, dtype=torch.bool)
        mask[largest(wide[None], counts)] = True
        u = torch.where(mask, wide, wide / m)
        found = push.push(eta / (1 - m) * g[None], counts)
        assert found.index.tolist() == mask.nonzero().flatten().tolist()
        assert torch.allclose(found.value, wide[mask], rtol=1e-12, atol=1e-12)
        sent[mask] += wide[mask]
        total += g
        assert torch.allclose(push.residual[0], m / (1 - m) * u, rtol=1e-11, atol=1e-11)
        assert (sent + m / (1 - m) * u - eta / (1 - m) * total).abs().max() < 1e-12


def test_dense_samomentum_is_heavy_ball() -> None:
    generator, eta, m = draw(3), 0.1, 0.9
    push = dgs.Push(torch.zeros(1, SIZE, dtype=torch.float64), m, exact)
    velocity = torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(20):
        g = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        velocity = m * velocity + eta * g
        found = push.push(eta / (1 - m) * g[None], [SIZE])
        assert torch.allclose(found.value, velocity, rtol=1e-12, atol=1e-12)


def dyadic(generator: torch.Generator) -> Tensor:
    """Numbers whose sums are exact in float64, and which bfloat16 holds."""
    return torch.randint(-7, 8, (1, SIZE), generator=generator).double() / 8


def asynchronous(pull: dgs.Pull, islands: int, steps: int, share: float, seed: int) -> dict[int, Tensor]:
    """Islands that push at random; what each has by what it was told."""
    generator = draw(seed)
    own = {}
    pushes = {k: dgs.Push(torch.zeros(1, SIZE, dtype=torch.float64), 0.0, exact) for k in range(islands)}
    for k in range(islands):
        pull.join(k)
        own[k] = pull.model.clone()
    for _ in range(steps):
        k = int(torch.randint(islands, (), generator=generator))
        pull.push(k, pushes[k].push(dyadic(generator), some(generator, share)))
        told = pull.pull(k)
        assert told is not None
        own[k][told.index] += told.value
        assert torch.equal(own[k], pull.has[k])
    return own


def top(count: int) -> dgs.Round:
    return lambda difference: largest(difference[None], [count])


@pytest.mark.parametrize("secondary", [None, 5])
def test_an_island_has_what_it_was_told_bit_for_bit(secondary: int | None) -> None:
    """theta_k = theta_0 + v_k, with v_k the sum of all it was told; without secondary compression it is the model."""
    start = dyadic(draw(9))[0]
    pull = dgs.Pull(start.clone(), None if secondary is None else top(secondary), wire=exact)
    own = asynchronous(pull, 4, 100, 0.1, 4)
    if secondary is None:
        told = pull.pull(0)
        assert told is not None
        own[0][told.index] += told.value
        assert torch.equal(own[0], pull.model)
    assert not torch.equal(start, pull.model)


@pytest.mark.parametrize("rule", [dgs, diloco])
def test_a_backlog_drains_until_nothing_is_left(rule: object) -> None:
    """In float32 with bfloat16 on the wire, each answer takes off what the last one rounded."""
    generator = draw(5)
    pull = rule.Pull(torch.randn(SIZE, generator=generator), worth=2**-16)  # type: ignore[attr-defined]
    for k in (0, 1):
        pull.join(k)
    for _ in range(3):
        for k in (0, 1):
            index = torch.arange(SIZE)
            pull.push(k, Sparse(index, rounded(torch.randn(SIZE, generator=generator))))
    for _ in range(6):
        pull.pull(1, all=True)
    assert torch.equal(pull.has[1], pull.model)
    assert not torch.equal(pull.has[0], pull.model)


def test_everything_sent_is_asynchronous_sgd() -> None:
    """One island: sequential SGD. Several: each gradient joins the model as it is, whoever sent it."""
    generator, eta = draw(6), 0.5
    for islands in (1, 3):
        pull = dgs.Pull(torch.zeros(SIZE, dtype=torch.float64), wire=exact)
        plain = torch.zeros(SIZE, dtype=torch.float64)
        pushes = [dgs.Push(torch.zeros(1, SIZE, dtype=torch.float64), 0.0, exact) for _ in range(islands)]
        for k in range(islands):
            pull.join(k)
        for step in range(30):
            k = step % islands
            g = dyadic(generator)
            pull.push(k, pushes[k].push(eta * g, [SIZE]))
            pull.pull(k)
            plain -= eta * g[0]
            assert torch.equal(pull.model, plain) and torch.equal(pull.has[k], plain)


def test_diloco_waits_for_the_slowest_and_moves_as_nesterov() -> None:
    pull = diloco.Pull(torch.zeros(3, dtype=torch.float64), wire=exact)
    places = torch.arange(3)
    outer = model = torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        pull.join(k)
    for number in range(4):
        deltas = [torch.full((3,), float(k + number), dtype=torch.float64) for k in range(3)]
        for k in (2, 0, 1):
            pull.push(k, Sparse(places, deltas[k]))
            assert (pull.pull(k) is None) == (k != 1)
        outer = 0.9 * outer + sum(deltas) / 3  # type: ignore[assignment]
        model = model - 0.7 * (sum(deltas) / 3 + 0.9 * outer)
        for k in range(3):
            pull.pull(k)
            assert torch.allclose(pull.has[k], model)
    pull.push(0, Sparse(places, deltas[0]))
    pull.push(1, Sparse(places, deltas[0]))
    pull.leave(2)  # nobody waits for one that has gone
    assert pull.pull(0) is not None


def test_the_rules_say_how_much_they_take() -> None:
    assert (dgs.gain(4), dense.gain(4), dense.gain(1), diloco.gain(4)) == (0.25, 0.5, 1.0, 1.0)
    assert (dgs.SHARE, dense.SHARE, diloco.SHARE) == (None, 1.0, 1.0)


def test_differences_that_the_weights_would_not_show_wait() -> None:
    pull = dgs.Pull(torch.ones(4), worth=2**-16)
    pull.join(0)
    pull.push(0, Sparse(torch.tensor([0, 1]), torch.tensor([2**-18, 2**-10])))
    told = pull.pull(0)
    assert told is not None and told.index.tolist() == [1]
    for _ in range(4):
        pull.push(0, Sparse(torch.tensor([0]), torch.tensor([2**-18])))
    told = pull.pull(0)
    assert told is not None and told.index.tolist() == [0] and told.value.tolist() == [-5 * 2**-18]


# ---- the print's slips, which must fail what holds above


def listing(slip: str, steps: int = 20) -> tuple[int, float]:
    """Algorithms 1 and 2 as printed, with one slip: (numbers sent, the largest of what an island is thought to have)."""
    generator = draw(7)
    model, has, u = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
    many = 0
    for _ in range(steps):
        u = u + torch.randn(SIZE, generator=generator, dtype=torch.float64)
        index = largest(u[None], [5])
        if slip == "residual zeroed, then read":
            u[index] = 0
            value = u[index]
        else:
            value = u[index].clone()
            u[index] = 0
        many += int((value != 0).sum())
        model[index] -= value
        told = model - has
        has = has - told if slip == "v - G" else has + told
    return many, float((has - model).abs().max())


def test_the_slips_of_the_print_fail() -> None:
    assert listing("none") == (100, 0.0)
    assert listing("residual zeroed, then read")[0] == 0
    assert listing("v - G")[1] > 1e4


def test_the_largest_are_found_without_zeros() -> None:
    x = torch.tensor([[0.0, -3.0, 1.0, 2.0], [0.0, 0.0, 0.5, 0.0], [1.0, 2.0, 3.0, 4.0]])
    assert largest(x, [2, 4, 0]).tolist() == [1, 3, 6]
    assert largest(x, [0, 0, 0]).tolist() == []
