"""`scale=published` is NVIDIA's own upcycling: every expert tensor of every file equals Megatron's, bit for bit.

Router rows are random in both and cannot be equal; what is compared is which experts share a row.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracles import peers
from tests.parity import tiny
from upcycle.__main__ import main
from upcycle.arch import registry
from upcycle.arch.ffn import FFN
from upcycle.io.checkpoint import Checkpoint

pytestmark = pytest.mark.oracle


@dataclass(frozen=True)
class Shape:
    """The ST and TS of the paper: softmax-then-topk without renormalisation, and topk-then-softmax."""

    experts: int
    granularity: int
    top_k: int
    pre_softmax: bool

    def __str__(self) -> str:
        return f"E{self.experts}G{self.granularity}T{self.top_k}-{'ST' if self.pre_softmax else 'TS'}"

    @property
    def c(self) -> float:
        """2410.07524, section 3.4: what the experts' sum lacks if the router is uniform."""
        return self.experts * self.granularity**2 / self.top_k if self.pre_softmax else self.granularity

    @property
    def words(self) -> list[str]:
        order = "softmax-then-topk" if self.pre_softmax else "topk-then-softmax"
        return [
            f"method.name={'copy' if self.granularity == 1 else 'virtual_group'}",
            f"experts={self.experts}", f"granularity={self.granularity}", f"top_k={self.top_k}",
            f"router.order={order}", f"router.normalize={not self.pre_softmax}",
        ]  # fmt: skip


SHAPES = [
    Shape(8, 1, 1, True),
    Shape(8, 1, 2, True),
    Shape(8, 8, 8, True),
    Shape(8, 8, 8, False),
    Shape(4, 2, 2, False),
    Shape(8, 1, 2, False),
]
# Megatron's name of the activation -> a tiny dense model that has it
DENSE = {"swiglu": "llama", "relu2": "arcee", "gelu": "starcoder2_no_bias", "geglu": "llama_gelu"}
ACTIVATIONS = ["swiglu", "relu2", "gelu"]
DTYPES = ["float32", "bfloat16"]
GEGLU = Shape(4, 2, 2, False)
CASES = [(s, a, d) for s in SHAPES for a in ACTIVATIONS for d in DTYPES]


def name_of(shape: Shape, activation: str, dtype: str) -> str:
    return f"{activation}-{dtype}-{shape}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The dense models, and all that Megatron makes of them; made once, however many processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "megatron"
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            for activation, variant in DENSE.items():
                for dtype in DTYPES:
                    made = tiny.make_variant(variant, shared / f"{activation}-{dtype}", dtype=getattr(torch, dtype))
                    save_file(neutral(made), shared / f"{activation}-{dtype}.safetensors")
            jobs = [
                {
                    "dense": str(shared / f"{activation}-{dtype}.safetensors"),
                    "out": str(shared / f"{name_of(shape, activation, dtype)}.safetensors"),
                    "activation": activation,
                }
                | asdict(shape)
                for shape, activation, dtype in [*CASES, (GEGLU, "geglu", "float32")]
            ]
            (shared / "jobs.json").write_text(json.dumps(jobs))
            peers.run("python", Path(__file__).with_name("megatron_oracle.py"), shared / "jobs.json")
            (shared / "done").touch()
    return shared


def neutral(dense: Path) -> dict[str, Tensor]:
    """The FFN matrices of a dense folder under our own names (spec.py)."""
    with Checkpoint.open(dense) as checkpoint:
        family = registry.family(checkpoint.config["model_type"])
        spec = family.read(checkpoint.config)
        sources = family.sources(spec)
        wanted = {f"layers.{layer}.{m}.weight" for layer in range(spec.layers) for m in spec.ffn_matrices}
        return {role: checkpoint.read(sources[role].name) for role in wanted}


def megatron(folder: Path, shape: Shape, activation: str, dtype: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name_of(shape, activation, dtype)}.safetensors")


def ours(folder: Path, out: Path, shape: Shape, activation: str, dtype: str, *words: str) -> dict[str, Tensor]:
    """What our converter writes, its tensors put together and named as Megatron's are.

    Experts of 12 neurons in bfloat16 are filled up to whole 16 bytes, which Megatron's are not: the rest is all zeros.
    """
    source = folder / f"{activation}-{dtype}"
    common = [f"source={source}", f"output={out}", "target=upcycled", "router.choice=any", "scale_in=weights"]
    assert main(["convert", *common, *shape.words, *words]) == 0
    with Checkpoint.open(source) as dense:
        width = dense.config["intermediate_size"] // shape.granularity
    with Checkpoint.open(out) as moe:
        made = {}
        for layer in range(moe.config["num_hidden_layers"]):
            there, here = f"model.layers.{layer}.mlp", f"layers.{layer}"
            made[f"{here}.router.weight"] = moe.read(f"{there}.gate.weight")
            for i in range(shape.experts * shape.granularity):
                names = [f"{there}.experts.{i}.{m}_proj.weight" for m in ("gate", "up", "down")]
                *fc1, fc2 = [moe.read(name) for name in names if name in moe.entries]
                assert not any(w[width:].any() for w in [*fc1, fc2.T])
                *fc1, fc2 = [*(w[:width] for w in fc1), fc2[:, :width]]
                made |= {f"{here}.experts.{i}.fc1.weight": torch.cat(fc1), f"{here}.experts.{i}.fc2.weight": fc2}
    return made


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the expert tensors that are not the same bits."""
    assert a.keys() == b.keys()
    return [
        name
        for name in a
        if ".experts." in name and not (a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]))
    ]


def equal_rows(router: Tensor) -> list[list[bool]]:
    """Which experts share a router row."""
    same: list[list[bool]] = (router[:, None] == router[None, :]).all(-1).tolist()
    return same


@pytest.mark.parametrize(("shape", "activation", "dtype"), CASES, ids=str)
def test_published_scale_is_megatrons_tensor_for_tensor(
    folder: Path, tmp_path: Path, shape: Shape, activation: str, dtype: str
) -> None:
    theirs = megatron(folder, shape, activation, dtype)
    made = ours(folder, tmp_path / "moe", shape, activation, dtype, "scale=published")
    assert len(theirs) == 2 * (1 + 2 * shape.experts * shape.granularity)
    assert differing(theirs, made) == []
    for layer in range(2):
        name = f"layers.{layer}.router.weight"
        assert equal_rows(theirs[name]) == equal_rows(made[name])
        assert len(made[name].unique(dim=0)) == shape.experts


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [Shape(8, 1, 2, True), Shape(4, 2, 2, False)], ids=str)
def test_twin_the_same_gain_where_it_is_exact_is_not_megatrons(
    folder: Path, tmp_path: Path, shape: Shape, activation: str
) -> None:
    """scale=exact, or its number where nothing is exact, puts c elsewhere.

    (With c = 8 or 64 the squared-ReLU rule is exact and the two are one: cube roots of powers of two.)
    """
    scale = f"scale={shape.c}" if shape.pre_softmax else "scale=exact"
    made = ours(folder, tmp_path / "moe", shape, activation, "float32", scale)
    wrong = differing(megatron(folder, shape, activation, "float32"), made)
    assert {name.split(".")[1] for name in wrong} == {"0", "1"}


@pytest.mark.parametrize(("shape", "activation", "dtype"), CASES, ids=str)
def test_megatron_does_what_the_paper_says(folder: Path, shape: Shape, activation: str, dtype: str) -> None:
    """The closed form, from our FFN algebra alone: expert i is part i mod G, all of its matrices times one factor."""
    dense, theirs = load_file(folder / f"{activation}-{dtype}.safetensors"), megatron(folder, shape, activation, dtype)
    factor = shape.c ** (1 / 2 if activation == "gelu" else 1 / 3)
    for layer in range(2):
        matrices = {m: w for m in ("gate", "up", "down") if (w := dense.get(f"layers.{layer}.{m}.weight")) is not None}
        whole = FFN.of(**matrices).scaled(dict.fromkeys(matrices, factor))
        width = whole.width // shape.granularity
        for i in range(shape.experts * shape.granularity):
            part = whole.neurons(slice(width * (i % shape.granularity), width * (i % shape.granularity + 1)))
            fc1 = torch.cat([part[m] for m in ("gate", "up") if m in part.matrices]).to(getattr(torch, dtype))
            assert torch.equal(theirs[f"layers.{layer}.experts.{i}.fc1.weight"], fc1)
            assert torch.equal(theirs[f"layers.{layer}.experts.{i}.fc2.weight"], part["down"].to(fc1.dtype))


def test_megatron_cuts_a_gated_gelu_in_the_wrong_place_and_we_do_not(folder: Path, tmp_path: Path) -> None:
    """Where the peer is wrong we differ, and know how: it cuts [gate; up] in two, so part 0 has gate rows alone."""
    dense, theirs = load_file(folder / "geglu-float32.safetensors"), megatron(folder, GEGLU, "geglu", "float32")
    made = ours(folder, tmp_path / "moe", GEGLU, "geglu", "float32", "scale=published")
    fc1 = "layers.0.experts.0.fc1.weight"
    gate, up, half, s = dense["layers.0.gate.weight"], dense["layers.0.up.weight"], 48, 2 ** (1 / 3)
    assert torch.equal(theirs[fc1], gate * s)
    assert torch.equal(made[fc1], torch.cat([gate[:half], up[:half]]) * s)


def test_twin_one_changed_bit_is_seen(folder: Path) -> None:
    theirs = megatron(folder, SHAPES[0], "swiglu", "bfloat16")
    name = "layers.1.experts.7.fc2.weight"
    changed: dict[str, Tensor] = theirs | {name: theirs[name].clone()}
    changed[name].view(torch.int16)[0, 0] ^= 1
    assert differing(theirs, changed) == [name]
