"""Router rows."""

from __future__ import annotations

import pytest
import torch

from upcycle.planning import routers


def test_router_rows_that_would_tie_are_refused() -> None:
    a, b = torch.randn(2, 64)
    assert routers.centred(torch.stack([a, b]), 0.01).shape == (2, 64)
    for rows in ([a, a, b], [a, a, a], [a]):
        with pytest.raises(ValueError, match="a different one"):
            routers.centred(torch.stack(rows), 0.01)
