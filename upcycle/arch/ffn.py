"""Hold a feed-forward block (FFN) as one value, and select, scale and change its neurons.

Neuron n is row n of `gate` and `up` (with their biases) and column n of `down`. The order of neurons does not change
the output. If neurons are split into disjoint sets, the outputs of the sets add up to the whole output. Every
initialisation method uses these two facts.

An FFN is lazy: it holds a function from a matrix's name to its tensor. `expert["down"]` reads only `down` from the
source, and selecting or changing neurons costs work only for the matrices that are read.

Shapes: F neurons (width), D hidden size, T tokens.  gate_FD  up_FD  down_DF  gate_bias_F  up_bias_F  down_bias_D
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
CLAMPED, ALPHA, LIMIT = "clamped_swiglu", 1.702, 7.0  # GPT-OSS


def gated_product(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return the input of `down`, made from the outputs of `gate` and `up`."""
    if activation == CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    return ACTIVATIONS[activation](gate) * up


# The dimension of each matrix that counts neurons; down_bias belongs to no neuron.
NEURON_DIM: Mapping[str, int] = {"gate": 0, "up": 0, "down": 1, "gate_bias": 0, "up_bias": 0}
MATRICES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class FFN:
    width: int
    hidden: int
    matrices: tuple[str, ...]  # the ones it has, from MATRICES; without "gate" it is not gated
    read: Callable[[str], Tensor]

    @staticmethod
    def of(**tensors: Tensor) -> FFN:
        """Make an FFN from tensors in memory: FFN.of(gate=..., up=..., down=...)."""
        names = tuple(name for name in MATRICES if name in tensors)
        hidden, width = tensors["down"].shape
        return FFN(width, hidden, names, tensors.__getitem__)

    @property
    def gated(self) -> bool:
        return "gate" in self.matrices

    def __getitem__(self, matrix: str) -> Tensor:
        return self.read(matrix)

    def neurons(self, index: slice | Tensor) -> FFN:
        """Return an FFN of the neurons at `index`, in that order; a slice gives views and copies nothing."""
        width = len(range(self.width)[index]) if isinstance(index, slice) else index.numel()

        def read(matrix: str) -> Tensor:
            whole, dim = self.read(matrix), NEURON_DIM.get(matrix)
            if dim is None:
                return whole
            if isinstance(index, slice):
                return whole[index] if dim == 0 else whole[:, index]
            return whole.index_select(dim, index)

        return replace(self, width=width, read=read)

    def without_gate(self) -> FFN:
        return replace(self, matrices=tuple(m for m in self.matrices if not m.startswith("gate")))

    def with_gate_as_up(self) -> FFN:
        """Return a gated FFN whose gate is a copy of `up`; with relu it computes squared ReLU, relu(u) * u.

        Scale `up` after this call, not before, because the gate must stay unscaled.
        """
        matrices = tuple(m for m in MATRICES if m.replace("gate", "up") in self.matrices)
        return replace(self, matrices=matrices, read=lambda matrix: self.read(matrix.replace("gate", "up")))

    def map(self, change: Callable[[str, Tensor], Tensor]) -> FFN:
        """Return an FFN that calls `change(name, matrix)` on each matrix when it is read."""
        return replace(self, read=lambda matrix: change(matrix, self.read(matrix)))

    def scaled(self, factors: Mapping[str, float]) -> FFN:
        """Return an FFN with each matrix multiplied by its factor, in float32 or wider, to round bf16 only once."""
        return self.map(lambda matrix, w: scale(w, factors.get(matrix, 1.0)))

    def __call__(self, x_TD: Tensor, activation: str) -> Tensor:
        """Apply the block to x_TD; this serves references and estimates and is not fast."""
        bias = {m: self.read(m) if m in self.matrices else None for m in ("gate_bias", "up_bias", "down_bias")}
        h_TF = functional.linear(x_TD, self["up"], bias["up_bias"])
        act = ACTIVATIONS[activation]
        h_TF = act(functional.linear(x_TD, self["gate"], bias["gate_bias"])) * h_TF if self.gated else act(h_TF)
        return functional.linear(h_TF, self["down"], bias["down_bias"])


def scale(w: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return w  # a copy keeps the bytes of the source
    return w.to(torch.promote_types(w.dtype, torch.float32)) * factor
