"""Places in the whole model, however it is divided."""

from __future__ import annotations

import itertools

import pytest
import torch

from training.islands.config import IslandsConfig
from training.islands.places import Layout, inside, share_of, whole


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5), (3, 2, 4, 5)])
def test_boxes_of_all_ranks_are_the_whole_and_nothing_twice(shape: tuple[int, ...]) -> None:
    cuts = [[(0, n // 2), (n // 2, n)] for n in shape]
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    found = []
    for box in itertools.product(*cuts):
        part = x[tuple(slice(a, b) for a, b in box)].flatten()
        index = torch.arange(len(part))
        assert torch.equal(whole(index, box, shape), part)
        found.append(part)
        there, where = inside(x.flatten(), box, shape)
        assert torch.equal(there.nonzero().flatten(), part) and torch.equal(where, index)
    assert torch.cat(found).sort().values.tolist() == x.flatten().tolist()


def test_a_layout_is_the_same_on_both_sides_and_knows_what_is_small() -> None:
    shapes = {"layers.0.ffn.experts.up": (4, 2, 8, 3), "layers.0.ffn.router.weight": (4, 3), "norm.weight": (3,),
              "layers.0.attention.q.weight": (9, 3)}  # fmt: skip
    layout, other = Layout(shapes), Layout(dict(reversed(shapes.items())))
    assert layout.digest == other.digest and layout.size == 4 * 48 + 12 + 3 + 27
    assert layout.digest != Layout(shapes | {"norm.weight": (4,)}).digest
    assert {name: (place.segments, place.dense) for name, place in layout.places.items()} == {
        "layers.0.attention.q.weight": (1, False),
        "layers.0.ffn.experts.up": (4, False),
        "layers.0.ffn.router.weight": (1, True),
        "norm.weight": (1, True),
    }
    x = torch.randn(layout.size)
    index = layout.top(0.1)(x)
    assert len(index) == 3 + 4 * 5 + 12 + 3 and bool((index.diff() > 0).all())
    assert (share_of(5, 0.01), share_of(1000, 0.02)) == (1, 20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"join": "here"}, "islands.join is 'here'; write HOST:PORT"),
        ({"join": "a:1", "local": 2}, "both set"),
        ({"share": 0.0}, "islands.share is 0.0; it must be above 0 and at most 1"),
        ({"momentum": 1.0}, "islands.momentum is 1.0"),
        ({"every": 0}, "islands.every is 0; it must be at least 1"),
        ({"patience": 0.0}, "islands.patience is 0.0"),
        ({"answer": 2.0}, "islands.answer is 2.0"),
        ({"throttle": -1.0}, "islands.throttle is -1.0"),
    ],
)
def test_keys_are_checked(words: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        IslandsConfig(**words)  # type: ignore[arg-type]
