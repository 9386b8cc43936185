"""What the plan says about engines follows from the rows that were asked; a row that was read wrong is never passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.engines import ENGINES
from tests.parity import tiny
from upcycle import convert, plugin
from upcycle import plan as plan_of
from upcycle.arch import engines, registry
from upcycle.arch.spec import DenseSpec, MoESpec

DENSE = DenseSpec("llama", 2, 64, 96, 4, 4, 16, 256, 128)
PLAIN = MoESpec(DENSE, (0, 1), (96,) * 4, 2, 4)
SHARED = replace(PLAIN, shared=32)
SCALED = replace(SHARED, output_scale=2.0)


def row(moe: MoESpec, **read: str) -> dict[str, Any]:
    return {"case": "x", "trained": False, "target": "dots1", "asks": list(engines.asks(moe)), "read": read}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(engines, "table", lambda: {"engines": {"A": "a 1"}, "rows": made})
    yield made


def test_right_is_what_rows_read_right_cover_together(rows: list[dict[str, Any]]) -> None:
    assert engines.fits("dots1", PLAIN) == (["transformers"], [], ["A: this architecture"])
    rows.append(row(PLAIN, A="right"))
    assert engines.fits("dots1", PLAIN) == (["transformers", "A"], [], [])
    assert engines.fits("dots1", SCALED) == (["transformers"], [], ["A: a shared expert, an output scale"])
    rows += [row(SHARED, A="right"), row(replace(PLAIN, output_scale=2.0), A="right")]
    assert engines.fits("dots1", SCALED) == (["transformers", "A"], [], [])
    assert engines.fits("mixtral", PLAIN)[2] == ["A: this architecture"]


def test_what_is_to_blame_is_what_no_row_read_right_has(rows: list[dict[str, Any]]) -> None:
    rows += [row(PLAIN, A="right"), row(SCALED, A="wrong: 3 of 64"), row(SHARED, A="right")]
    assert engines.fits("dots1", PLAIN)[0] == engines.fits("dots1", SHARED)[0] == ["transformers", "A"]
    assert engines.fits("dots1", replace(PLAIN, output_scale=3.0))[1] == ["A: wrong: 3 of 64"]
    # each alone is right and both together are wrong: then all of that row is in doubt
    rows.append(row(replace(PLAIN, output_scale=2.0), A="right"))
    assert engines.fits("dots1", SCALED)[1] == ["A: wrong: 3 of 64"]


def test_a_reason_known_from_the_source_takes_the_place_of_numbers(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BECAUSE", {("A", "dots1", "an output scale"): "it ignores the scale"})
    rows += [row(SHARED, A="right"), row(SCALED, A="wrong: 3 of 64")]
    assert engines.fits("dots1", SCALED)[1] == ["A: it ignores the scale"]


def test_the_table_has_every_target_and_every_engine_that_can_read_it() -> None:
    stock = {t for t in plugin.names("upcycle.arch.targets") if registry.readable(t).can.stock}
    found = engines.table()
    assert {row["target"] for row in found["rows"]} == stock | {"upcycled"} and set(found["engines"]) == set(ENGINES)
    for row in found["rows"]:
        others = {"SGLang"} if row["case"].startswith("upcycled wide") else {"vLLM"}
        readers = set(found["engines"]) - {*engines.OWN_ONLY} if row["target"] in stock else others
        assert set(row["read"]) == readers, row["case"]
        assert all(said == "right" or said.startswith(("wrong: ", "refused: ")) for said in row["read"].values())
        assert not any("/" + folder in said for said in row["read"].values() for folder in ("tmp", "home", "work"))
    for engine, target, ask in engines.BECAUSE:
        said = {row["read"][engine] for row in found["rows"] if row["target"] == target and ask in row["asks"]}
        assert said and "right" not in said, "the reason is out of date"


def test_a_new_shared_gate_is_one_half_as_llama_cpp_computes_it_too(tmp_path: Path) -> None:
    source = tiny.make("qwen2", tmp_path / "dense")
    folder = convert(
        source=source, target="qwen2_moe", experts=4, top_k=2, shared=1, output=tmp_path / "moe", quiet=True
    )
    gates = [w for name, w in load_file(folder / "model.safetensors").items() if "shared_expert_gate" in name]
    for gate in gates:
        x = torch.randn(50, gate.shape[1], generator=torch.Generator().manual_seed(0)) @ gate.float().T
        assert (x.sigmoid() == 0.5).all() and (torch.nn.functional.silu(x) / x == 0.5).all()
    assert gates


@pytest.mark.parametrize(
    ("family", "overrides", "words", "said"),
    [
        ("llama", {}, {"target": "mixtral"}, "transformers, vLLM, llama.cpp, MLX, mistral.rs"),
        (
            "llama",
            {"hidden_act": "gelu"},
            {"target": "mixtral"},
            "transformers, mistral.rs; not vLLM: it computes SiLU whatever",
        ),
        ("qwen2", {}, {"target": "qwen2_moe"}, "transformers, vLLM; not llama.cpp: it never normalises the weights"),
        (
            "gemma2",
            {},
            {},
            "transformers with trust_remote_code=True, vLLM with --trust-remote-code; not SGLang: wrong: 64 of 64 greedy "
            "tokens, log-probabilities off by 1.1; not asked: LMDeploy (it needs a GPU; `upcycle export FOLDER OUTPUT",
        ),
    ],
)
def test_a_plan_says_what_reads_it(
    family: str, overrides: dict[str, Any], words: dict[str, str], said: str, tmp_path: Path
) -> None:
    plan = plan_of(words, source=tiny.make(family, tmp_path / "dense", **overrides), experts=4, top_k=2)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("runs on"))
    assert line.removeprefix("runs on").lstrip().startswith(said)
