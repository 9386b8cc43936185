"""Router losses, selection bias, capacity and statistics: against loops, finite differences and a whole model."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from training.dispatch import Dispatched, Dispatcher
from training.model.decoder import Decoder
from training.model.layers import uncompiled
from training.model.moe import MoE, Routing
from training.optim.balance import (
    AuxLoss,
    Balance,
    BalanceConfig,
    balance_loss,
    capacity,
    capacity_mask,
    probabilities,
    shares,
    update_bias_,
    z_loss,
)
from training.optim.loads import RouterLoad, coherence, expert_counts, token_entropy
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.reading import build

T, E, K = 12, 5, 2


def logits(seed: int = 0, tokens: int = T) -> Tensor:
    return torch.randn(tokens, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def chosen(logits_TE: Tensor) -> Tensor:
    return logits_TE.topk(K, dim=-1).indices


class Losses(NamedTuple):
    total: Tensor
    aux: Tensor
    z: Tensor


def router_loss(
    config: BalanceConfig,
    logits_TE: Tensor,
    expert_TK: Tensor,
    count_E: Tensor,
    score: str = "softmax",
    sequences: int = 1,
) -> Losses:
    """What a layer's router adds to the loss, as one number that autograd differentiates: the product has only its
    gradient."""
    probability_TE = probabilities(logits_TE, score)
    if config.aux_scope == "sequence":
        probability_TE = probability_TE.view(sequences, -1, E)
        count_E = expert_counts(expert_TK.view(sequences, -1, expert_TK.shape[-1]), E)
    aux = balance_loss(probability_TE, shares(count_E, logits_TE.dtype)).mean()
    z = z_loss(logits_TE)
    return Losses(config.aux_weight * aux + config.z_weight * z, aux, z)


def loss_by_loops(logits_TE: Tensor, expert_TK: Tensor, score: str) -> float:
    share, mean = [0.0] * E, [0.0] * E
    for t in range(len(logits_TE)):
        row = [float(x) for x in logits_TE[t]]
        scores = [math.exp(x) for x in row] if score == "softmax" else [1 / (1 + math.exp(-x)) for x in row]
        for e in range(E):
            mean[e] += scores[e] / sum(scores) / len(logits_TE)
        for e in expert_TK[t].tolist():
            share[e] += 1 / expert_TK.numel()
    return E * sum(f * p for f, p in zip(share, mean, strict=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_is_the_sum_of_shares_and_probabilities(score: str) -> None:
    x = logits()
    expert = chosen(x)
    got = float(balance_loss(probabilities(x, score), shares(expert_counts(expert, E), x.dtype)))
    assert abs(got - loss_by_loops(x, expert, score)) < 1e-10
    other = "sigmoid" if score == "softmax" else "softmax"
    assert abs(got - loss_by_loops(x, expert, other)) > 1e-3
    config = BalanceConfig(aux_weight=0.5, aux_scope="micro_batch", z_weight=0.25)
    z = float(x.exp().sum(-1).log().square().mean())
    total = float(router_loss(config, x, expert, expert_counts(expert, E), score).total)
    assert abs(total - 0.5 * got - 0.25 * z) < 1e-10
    halves = [loss_by_loops(x[s], expert[s], score) for s in (slice(6), slice(6, 12))]
    config = BalanceConfig(aux_weight=1, aux_scope="sequence")
    assert (
        abs(float(router_loss(config, x, expert, expert_counts(expert, E), score, 2).total) - sum(halves) / 2) < 1e-10
    )
    assert abs(sum(halves) / 2 - got) > 1e-3  # a sequence is not the micro-batch


def test_balance_is_one_and_collapse_is_as_many_as_experts() -> None:
    even = torch.zeros(E, E, dtype=torch.float64)
    assert abs(float(balance_loss(probabilities(even, "softmax"), shares(torch.full((E,), 3), even.dtype))) - 1) < 1e-10
    one = torch.tensor([[60.0, 0, 0, 0, 0]], dtype=torch.float64)
    assert (
        abs(float(balance_loss(probabilities(one, "softmax"), shares(torch.tensor([9, 0, 0, 0, 0]), one.dtype))) - E)
        < 1e-10
    )
    assert float(balance_loss(probabilities(one, "softmax"), shares(torch.zeros(E, dtype=torch.int64), one.dtype))) == 0
    assert probabilities(torch.full((1, E), -1e4), "sigmoid").isfinite().all()  # each sigmoid is 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])
def test_gradients_of_the_router_losses(score: str, scope: str) -> None:
    x = logits().requires_grad_()
    expert = chosen(x.detach())
    counts = expert_counts(expert, E) + torch.arange(E)
    config = BalanceConfig(aux_weight=0.3, aux_scope=scope, z_weight=0.2)

    def loss(logits_TE: Tensor) -> Tensor:
        return router_loss(config, logits_TE, expert, counts, score, 3).total

    assert gradcheck(loss, (x,), atol=1e-8, rtol=1e-7)
    assert gradcheck(z_loss, (x,), atol=1e-8, rtol=1e-7)
    with pytest.raises(RuntimeError):  # a part that the gradient does not know of
        gradcheck(lambda leaf: loss(leaf) + 1e-3 * z_loss(leaf.detach()), (x,), atol=1e-8, rtol=1e-7)


def test_aux_loss_adds_its_gradient_and_nothing_else() -> None:
    expert = chosen(logits())
    config = BalanceConfig(aux_weight=0.3, aux_scope="micro_batch", z_weight=0.1)

    def forward(x: Tensor, how: str) -> Tensor:
        loss = router_loss(config, x, expert, expert_counts(expert, E)).total
        y = x.softmax(-1).gather(1, expert)
        seen: Tensor = AuxLoss.apply(y, 2 * loss, torch.tensor(0.5).double()) if how == "hook" else y  # type: ignore[no-untyped-call]
        assert torch.equal(seen, y)
        main = (seen * torch.arange(1.0, 3.0, dtype=torch.float64)).sum()
        return main + loss if how == "threaded" else main

    def gradient(how: str) -> Tensor:
        x = logits().requires_grad_()
        return torch.autograd.grad(forward(x, how), x)[0]

    torch.testing.assert_close(gradient("hook"), gradient("threaded"), rtol=0, atol=1e-10)
    assert torch.equal(forward(logits(), "hook"), forward(logits(), "without"))


def test_the_bias_follows_the_sign_of_the_load() -> None:
    bias = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]])
    counts = torch.tensor([[10, 0, 5, 5], [3, 3, 3, 3]])
    update_bias_(bias, counts, 0.001, torch.tensor(True))
    assert bias.tolist() == [[0.5] * 4, [0.0] * 4]  # a skipped step
    update_bias_(bias, counts, 0.001)
    want = torch.tensor([[0.499, 0.501, 0.5, 0.5], [0, 0, 0, 0]])
    torch.testing.assert_close(bias, want, rtol=0, atol=1e-7)
    assert (bias[0] - (1 - want[0])).abs().max() > 1e-3  # not the other way round
    with pytest.raises(AssertionError, match="float32"):
        update_bias_(bias.bfloat16(), counts, 0.001)


def test_the_bias_balances_a_lopsided_router() -> None:
    x = logits(tokens=400) + torch.tensor([2.0, 0, 0, 0, -2])
    bias = torch.zeros(E)

    def counts() -> Tensor:
        return expert_counts(chosen(x.sigmoid() + bias), E)

    before = counts()
    for _ in range(600):
        update_bias_(bias, counts(), 1e-3)
    assert before.max() > 1.5 * before.double().mean() and counts().max() < 1.05 * before.double().mean()


def mask_by_loops(expert: Tensor, weight: Tensor, factor: float, policy: str) -> list[list[bool]]:
    tokens, k = expert.shape
    room = math.ceil(factor * tokens * k / E)
    keep = [[False] * k for _ in range(tokens)]
    for e in range(E):
        queue = [(t, i) for t in range(tokens) for i in range(k) if expert[t, i] == e]
        if policy == "probability":
            queue.sort(key=lambda ti: -float(weight[ti]))  # stable: ties keep the order of tokens
        for t, i in queue[:room]:
            keep[t][i] = True
    return keep


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 40),
    factor=st.sampled_from([0.1, 0.5, 1.0, 1.25, 2.0, 5.0]),
    policy=st.sampled_from(["probability", "position"]),
    coarse=st.booleans(),
)
def test_capacity_keeps_what_a_loop_keeps(seed: int, tokens: int, factor: float, policy: str, coarse: bool) -> None:
    x = logits(seed, tokens)
    weight, expert = x.softmax(-1).topk(K, dim=-1)
    if coarse:
        weight = (weight * 4).round()  # many ties
    keep, dropped = capacity_mask(expert, weight, E, factor, policy)
    assert keep.tolist() == mask_by_loops(expert, weight, factor, policy)
    assert abs(float(dropped) - (~keep).double().mean()) < 1e-12
    count = torch.zeros(E, dtype=torch.int64).index_add_(0, expert[keep], torch.ones_like(expert[keep]))
    assert count.max() <= capacity(tokens, K, E, factor)
    again, _ = capacity_mask(expert.int(), weight, E, factor, policy)
    assert torch.equal(again, keep)


def test_statistics_over_steps_layers_and_ranks() -> None:
    load = RouterLoad(2, E)
    assert load.count(0, torch.tensor([[0, 0], [0, 0]])).tolist() == [4, 0, 0, 0, 0]
    load.average(0, 2, dropped=torch.tensor(0.0), aux=None)
    seen = load.count(0, torch.tensor([[1, 1], [1, 1]])).clone()
    load.average(0, 2, dropped=torch.tensor(0.5), router_entropy=torch.tensor(0.25), z=torch.tensor(math.nan))
    assert seen.tolist() == [4, 4, 0, 0, 0]  # the step so far
    load.count(1, torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]))
    assert load.end_step(reduce=lambda t: 2 * t).tolist() == [[8, 8, 0, 0, 0], [4, 4, 4, 4, 4]]
    assert load.count(0, torch.tensor([[2, 2]])).tolist() == [0, 0, 2, 0, 0]  # the next step
    load.average(0, 1, dropped=torch.tensor(0.0), z=torch.tensor(3.0))
    assert seen.tolist() == [4, 4, 0, 0, 0]
    load.end_step()
    resumed = RouterLoad(2, E)
    resumed.load_state_dict(load.state_dict())
    first, second = load.fetch()
    assert str(resumed.fetch()) == str([first, second])
    assert first.histogram == (4, 4, 2, 0, 0) and first.max_over_mean == 2 and abs(first.dropped - 0.2) < 1e-12
    assert abs(first.entropy + (0.8 * math.log(0.4) + 0.2 * math.log(0.2)) / math.log(E)) < 1e-12
    assert first.router_entropy == 0.25 and first.z == 3 and math.isnan(first.aux)
    assert second.histogram == (2,) * 5 and second.max_over_mean == 1 and abs(second.entropy - 1) < 1e-12
    assert math.isnan(second.dropped) and math.isnan(second.router_entropy)
    assert load.fetch()[0].histogram == (0,) * 5
    load.count(1, torch.tensor([[0]]))
    load.average(1, 4, aux=torch.tensor(1.5))
    load.end_step()
    again = load.fetch(reduce=lambda t: 3 * t)[1]
    assert again.histogram == (3, 0, 0, 0, 0) and again.aux == 1.5 and math.isnan(again.z)


@pytest.mark.parametrize(
    ("granularity", "chosen", "whole", "missing", "doubled"),
    [
        # K = G: experts 2 * e and 2 * e + 1 are the two slices of copy e
        (2, [[0, 1], [6, 7], [0, 3], [6, 1], [0, 2], [1, 7]], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]),
        (4, [[3, 2, 1, 0], [4, 1, 10, 3], [0, 4, 8, 3], [0, 4, 1, 5], [2, 6, 10, 14]], [1, 1, 0, 0, 0], [0, 0, 2, 2, 3], [0, 0, 1, 2, 1]),
        # K = 2 G
        (2, [[0, 1, 2, 3], [0, 5, 2, 7], [0, 2, 4, 1], [1, 3, 5, 7]], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]),
        (
            4,
            [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 8, 1, 2, 3, 6, 7], [0, 4, 8, 12, 1, 5, 9, 13], [0, 4, 8, 1, 5, 9, 2, 3]],
            [1, 0, 0, 0], [0, 1, 2, 2], [0, 1, 2, 2],
        ),
        # K is no multiple of G: the FFN that was begun is not whole
        (2, [[0, 1, 2], [0, 2, 4]], [0, 0], [1, 1], [0, 1]),
        (4, [[0, 5], [0, 4]], [0, 0], [2, 3], [0, 1]),
        (4, [[0, 1, 2, 3, 4]], [0], [3], [0]),
    ],
)  # fmt: skip
def test_coherence_of_choices_by_hand(
    granularity: int, chosen: list[list[int]], whole: list[int], missing: list[int], doubled: list[int]
) -> None:
    wanted = torch.tensor([whole, missing, doubled]).double()
    for row, want in zip(chosen, wanted.T, strict=True):  # a token alone
        assert coherence(torch.tensor([row]), granularity).tolist() == want.tolist(), row
    assert coherence(torch.tensor(chosen), granularity).tolist() == wanted.mean(1).tolist()


def test_the_figures_ask_the_device_for_nothing() -> None:
    """A tensor without memory has no number to wait for."""
    load, expert_TK = RouterLoad(1, 8, "meta"), torch.zeros(6, 4, dtype=torch.int64, device="meta")
    load.count(0, expert_TK)
    load.average(0, 6, whole=coherence(expert_TK, 2)[0], z=z_loss(torch.zeros(6, 8, device="meta")))
    load.end_step()
    with pytest.raises((RuntimeError, NotImplementedError)):
        load.fetch()


def test_token_entropy() -> None:
    assert abs(float(token_entropy(torch.full((3, E), 1 / E, dtype=torch.float64))) - 1) < 1e-12
    assert float(token_entropy(torch.eye(E, dtype=torch.float64))) == 0


# ---- in a model


def decoder(score: str = "softmax", layers: int = 2) -> Decoder:
    dense = DenseSpec("llama", layers, 16, 12, 2, 2, 8, 23, 64)
    spec = MoESpec(dense, tuple(range(layers)), (6,) * E, top_k=K, copies=E, score=score)  # type: ignore[arg-type]
    net = Decoder(spec, experts="reference", compute=torch.float64).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return net


def batch(seed: int, sequences: int = 2) -> Tensor:
    return torch.randint(23, (sequences, 9), generator=torch.Generator().manual_seed(seed))


def router_gradients(net: Decoder) -> list[Tensor]:
    out = []
    for module in net.modules():
        if isinstance(module, MoE):
            assert module.router.weight.grad is not None
            out.append(module.router.weight.grad.clone())
    return out


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])
def test_a_model_gets_the_gradient_of_its_router_losses(scope: str, score: str) -> None:
    tokens = batch(1)
    hooked, plain = decoder(score), decoder(score)
    config = BalanceConfig(aux_weight=0.7, aux_scope=scope, z_weight=0.1)
    balance = Balance(config, hooked, scale=0.5, sequences=2)
    loss = hooked.loss(tokens[:, :-1], tokens[:, 1:]) * 0.5
    loss.backward()  # type: ignore[no-untyped-call]

    routings: list[Any] = []
    for module in plain.modules():
        if isinstance(module, MoE):
            module.balance = lambda routing: routings.append(routing) or routing  # type: ignore[func-returns-value]
    without = plain.loss(tokens[:, :-1], tokens[:, 1:]) * 0.5
    assert torch.equal(without, loss)
    without.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    main_only = router_gradients(plain)
    plain.zero_grad()
    total = without
    for r in routings:
        counts = expert_counts(r.expert_TK, E)
        total = total + 0.5 * router_loss(config, r.logits_TN, r.expert_TK, counts, score, 2).total
    total.backward()  # type: ignore[no-untyped-call]
    for got, want, missing in zip(router_gradients(hooked), router_gradients(plain), main_only, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        assert (got - missing).abs().max() > 1e-4
    balance.end_step()
    for layer, r in zip(balance.load.fetch(), routings, strict=True):
        assert sum(layer.histogram) == tokens[:, 1:].numel() * K
        losses = router_loss(config, r.logits_TN, r.expert_TK, expert_counts(r.expert_TK, E), score, 2)
        assert abs(layer.aux - losses.aux) < 1e-12 and abs(layer.z - losses.z) < 1e-12
        assert abs(layer.router_entropy - token_entropy(probabilities(r.logits_TN, score))) < 1e-12
        assert math.isnan(layer.whole)  # each expert is a copy of its own


def test_a_model_of_slices_is_whole_while_rows_of_a_group_are_equal() -> None:
    net = decoder()
    blocks = [module for module in net.modules() if isinstance(module, MoE)]
    spec = replace(blocks[0].spec, widths=(6,) * 8, copies=4, granularity=2)
    net = Decoder(spec, experts="reference", compute=torch.float64).double()
    blocks = [module for module in net.modules() if isinstance(module, MoE)]
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype) * 0.3)
        for block in blocks:
            block.router.weight.copy_(block.router.weight[::2].repeat_interleave(2, 0))
    balance = Balance(BalanceConfig(aux_weight=0), net)
    seen: list[list[float]] = []
    for changed in (False, True):
        if changed:
            with torch.no_grad():  # the second slices of the second layer are like the first ones, at other copies
                blocks[1].router.weight[1::2] = blocks[1].router.weight[0::2].roll(1, 0)
                blocks[1].router.weight[3] *= 10
        net.loss(batch(1)[:, :-1], batch(1)[:, 1:])
        balance.end_step()
        seen.append([x for layer in balance.load.fetch() for x in (layer.whole, layer.missing, layer.doubled)])
    assert seen[0] == [1, 0, 0] * 2
    assert seen[1][:3] == [1, 0, 0] and 0 < seen[1][3] < 1 and seen[1][4] == seen[1][5] == 1 - seen[1][3]


def test_global_counts_are_those_of_the_step_so_far_and_of_all_ranks() -> None:
    net = decoder()
    Balance(BalanceConfig(aux_scope="global"), net).load.step_NE.fill_(7)  # an earlier object is replaced
    asked: list[list[int]] = []

    def reduce(counts: Tensor) -> Tensor:
        asked.append(counts.tolist())
        return counts

    balance = Balance(BalanceConfig(aux_scope="global"), net, reduce=reduce)
    for seed in (1, 2):
        net.loss(batch(seed)[:, :-1], batch(seed)[:, 1:]).backward()  # type: ignore[no-untyped-call]
    assert [sum(counts) for counts in asked] == [32, 32, 64, 64]
    assert asked[2:] == balance.load.step_NE.tolist()
    with torch.no_grad():
        net(batch(3))  # validation counts nothing
    assert len(asked) == 4 and balance.load.step_NE.sum() == 128


def test_capacity_in_a_model_changes_training_and_not_validation() -> None:
    tokens = batch(1)
    plain, limited, roomy = decoder(), decoder(), decoder()
    balance = Balance(BalanceConfig(capacity_factor=0.5, aux_weight=0), limited)
    Balance(BalanceConfig(capacity_factor=float(E), aux_weight=0), roomy)
    want = plain.loss(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(roomy.loss(tokens[:, :-1], tokens[:, 1:]), want)
    assert not torch.equal(limited.loss(tokens[:, :-1], tokens[:, 1:]), want)
    with torch.no_grad():
        assert torch.equal(limited.loss(tokens[:, :-1], tokens[:, 1:]), want)
    balance.end_step()
    assert all(layer.dropped >= 0.5 - E / 32 for layer in balance.load.fetch())


@pytest.mark.parametrize(("pad", "room"), [(False, None), (True, capacity(16, K, E, 0.5))])
def test_padding_tells_the_dispatcher_what_an_expert_has_room_for(pad: bool, room: int | None) -> None:
    net, told = decoder(), []
    Balance(BalanceConfig(capacity_factor=0.5, pad_to_capacity=pad, aux_weight=0), net)
    for block in (module for module in net.modules() if isinstance(module, MoE)):

        def dispatch(
            x: Tensor, weight: Tensor, expert: Tensor, room: int | None, to: Dispatcher = block.dispatcher
        ) -> Dispatched:
            told.append((room, int(expert[weight != 0].bincount().max())))
            return to.dispatch(x, weight, expert, room)

        block.dispatcher = SimpleNamespace(
            dispatch=dispatch, combine=block.dispatcher.combine, can=block.dispatcher.can
        )  # type: ignore[assignment]
    net.loss(batch(1)[:, :-1], batch(1)[:, 1:])
    assert [found for found, _ in told] == [room] * 2
    assert max(most for _, most in told) == capacity(16, K, E, 0.5), "and no less than it is needed"
    with torch.no_grad():  # validation drops nothing, so that any number may come
        net.loss(batch(1)[:, :-1], batch(1)[:, 1:])
    assert [found for found, _ in told[2:]] == [None] * 2


def test_selection_biases_move_with_the_step_and_are_in_the_checkpoint() -> None:
    net = decoder("sigmoid")
    net.load_state_dict(decoder("sigmoid").state_dict())
    balance = Balance(BalanceConfig(bias_rate=0.01, aux_weight=0), net)
    names = [name for name in net.state_dict() if name.endswith("router.bias")]
    assert len(names) == 2 and not {n for n, _ in net.named_parameters()} & set(names)
    loss = net.loss(batch(1)[:, :-1], batch(1)[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    counts = balance.load.step_NE.clone()
    balance.end_step(torch.tensor(True))
    assert not any(net.state_dict()[name].any() for name in names)  # skipped
    balance.load.step_NE.copy_(counts)
    balance.end_step()
    for name, count in zip(names, counts, strict=True):
        want = 0.01 * torch.sign(count.double().mean() - count)
        torch.testing.assert_close(net.state_dict()[name].double(), want, rtol=0, atol=1e-8)
        assert want.any()
    with pytest.raises(ValueError, match="set it to 0 and use aux_weight"):
        Balance(BalanceConfig(bias_rate=0.01), decoder("softmax"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"aux_scope": "batch"}, "balance.aux_scope is 'batch'; it must be one of micro_batch, sequence, global"),
        ({"drop_policy": "random"}, "it must be one of probability, position"),
        ({"aux_weight": -1}, "0 switches it off"),
        ({"capacity_factor": math.inf}, "balance.capacity_factor is inf"),
        ({"pad_to_capacity": True}, "balance.pad_to_capacity needs a capacity, and balance.capacity_factor is 0"),
        ({"aux_wieght": 1}, "did you mean 'aux_weight'"),
    ],
)
def test_a_bad_config_is_one_sentence(values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        build(BalanceConfig, values)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert build(BalanceConfig, {}) == BalanceConfig()


def test_the_gradient_of_scope_global_is_of_the_counts_so_far() -> None:
    """Micro-batch m is weighed by the choices of 1 ... m: of one micro-batch the step's loss, of several near to it."""
    tokens, parts = torch.cat([batch(seed) for seed in (1, 2, 3, 4)]), 4
    config = BalanceConfig(aux_weight=0.7, aux_scope="global")

    def step(count: int) -> list[Tensor]:
        net = decoder()
        Balance(config, net, scale=1 / count)
        for part in tokens.chunk(count):
            (net.loss(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()).backward()  # type: ignore[no-untyped-call]
        return router_gradients(net)

    def by_hand(whole: bool) -> list[Tensor]:
        net, routings = decoder(), [[] for _ in range(parts)]  # type: ignore[var-annotated]
        blocks = [module for module in net.modules() if isinstance(module, MoE)]
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(tokens.chunk(parts)):
            for block in blocks:
                block.balance = lambda routing, n=number: routings[n].append(routing) or routing  # type: ignore[misc]
            total = total + net.loss(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()
        for number in range(parts):
            for layer, routing in enumerate(routings[number]):
                seen = routings if whole else routings[: number + 1]
                counts = sum(expert_counts(of[layer].expert_TK, E) for of in seen)
                probability = probabilities(routing.logits_TN, blocks[layer].spec.score)
                share = shares(counts, probability.dtype)  # type: ignore[arg-type]
                total = total + 0.7 / parts * balance_loss(probability, share)
        total.backward()  # type: ignore[no-untyped-call]
        return router_gradients(net)

    for got, want in zip([*step(1), *step(parts)], [*by_hand(whole=True), *by_hand(whole=False)], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    for got, whole in zip(step(parts), step(1), strict=True):
        assert float((got - whole).norm() / whole.norm()) > 1e-4


@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])
def test_ranks_tell_each_other_counts_only_for_what_needs_them(scope: str) -> None:
    """No collective a layer for the z-loss alone, nor for watching."""

    def asked(**changed: float) -> int:
        calls: list[Tensor] = []

        def reduce(counts: Tensor) -> Tensor:
            calls.append(counts)
            return counts

        net = decoder()
        config = BalanceConfig(**{"aux_weight": 0.0, "aux_scope": scope} | changed)  # type: ignore[arg-type]
        balance = Balance(config, net, sequences=2, reduce=reduce, reduce_sequence=reduce)
        net.loss(batch(1)[:, :-1], batch(1)[:, 1:]).backward()  # type: ignore[no-untyped-call]
        balance.end_step()
        return len(calls)

    assert asked(aux_weight=0.1) == asked(aux_weight=0.1, z_weight=0.1) > 0
    assert asked() == asked(z_weight=0.1) == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 2, 1, 0, 2, 1]])
def test_figures_are_those_of_each_micro_batch_in_whatever_order(order: list[int], monkeypatch: Any) -> None:
    """Stages of a pipeline interleave; a few layers may be more than are remembered."""
    found = []
    for together in (0, 3 * T * E):
        monkeypatch.setattr("training.optim.balance.TOGETHER", together)
        balance = Balance(BalanceConfig(capacity_factor=0.5), decoder(layers=3))
        for number, layer in enumerate(order):
            scores = logits(number, T + number // 3).requires_grad_()
            expert = chosen(scores.detach())
            balance.route(layer, Routing(scores.softmax(-1).gather(1, expert), expert, scores, scores.softmax(-1)))
        balance.end_step()
        found.append(balance.load.fetch())
        for layer, load in enumerate(found[-1]):
            mine = [logits(n, T + n // 3) for n, at in enumerate(order) if at == layer]
            z = sum(float(z_loss(x)) * len(x) for x in mine) / sum(map(len, mine))
            assert abs(load.z - z) < 1e-12 and load.dropped > 0
    assert found[0] == found[1] or str(found[0]) == str(found[1])


def test_a_router_is_as_exact_where_autocast_is_on() -> None:
    router = next(module for module in decoder().modules() if isinstance(module, MoE)).router.float()
    x_TD = torch.randn(9, 16, generator=torch.Generator().manual_seed(2))
    plain = router(x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(got, want) for got, want in zip(router(x_TD)[:4], plain[:4], strict=True))


def test_a_compiler_meets_the_same_block_in_every_layer() -> None:
    """Balance knows which layer it watches. If a compiler saw that, it would compile each layer anew and, after eight,
    none at all."""
    net = decoder(layers=4)
    Balance(BalanceConfig(), net)
    tokens = batch(1)
    plain = net.loss(tokens[:, :-1], tokens[:, 1:])
    torch._dynamo.reset()
    for layer in net.layers.values():
        layer.ffn.region = uncompiled(layer.ffn.region)  # the reference's experts are a loop of the host
        layer.compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        assert torch.equal(net.loss(tokens[:, :-1], tokens[:, 1:]), plain)
    torch._dynamo.reset()
