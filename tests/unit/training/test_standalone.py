"""A run's folder stands alone: with the dense model and the measured text gone it resumes, is asked and exports as if
they were there; no weight is made that a checkpoint then replaces; and text is measured once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evaluation.cli.eval import main as evaluate
from evaluation.judge.experts import routing
from evaluation.judge.logged import load
from evaluation.show import facts
from tests.parallel import ranks
from tests.parallel.runs import on_rank, stopped_on_rank
from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.checkpoint import layout, standalone
from training.checkpoint.standalone import keeps, kept
from training.cli.prepare import main as prepare
from training.config.reading import read_config
from training.config.schema import ModelConfig
from training.data import open as opening
from training.data.open import open_training
from training.observe.metrics import read as read_metrics
from training.run import parts
from training.run.build import begin, start
from training.run.loop import train
from upcycle.io.checkpoint import Checkpoint
from upcycle.text import clusters, measure, observe

WORDS = [
    "data.sequence=24", "batch=4", "micro_batch=2", "log_every=1", "schedule.warmup=1", "schedule.peak=1e-3",
    "model.dtype=float32", "checkpoint.every=2", "checkpoint.asynchronous=false", "steps=4", "device=cpu",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A dense model with its tokenizer, data, and text to measure on."""
    tiny.make("llama", tmp_path / "dense", vocab_size=400)
    make_tokenizer(tmp_path / "dense", bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "dense" / "tokenizer_config.json").write_text(json.dumps(settings))
    source = jsonl(tmp_path / "data.jsonl", texts(40, 0))
    assert prepare([str(tmp_path / "data"), f"tokenizer={tmp_path / 'dense'}", f"sources=[{source}]"]) == 0
    (tmp_path / "measured.txt").write_text("\n".join(texts(20, 7)))
    return tmp_path


def calibrated(place: Path, **more: Any) -> str:
    settings = {
        "source": str(place / "dense"), "experts": 4, "granularity": 2, "method": "virtual_group", "top_k": 2,
        "router": {"normalize": False, "init": {"std": 0.3}}, "scale": "calibrated",
        "calibration": {"texts": [str(place / "measured.txt")], "tokens": 128, "sequence": 32}, **more,
    }  # fmt: skip
    return f"model.upcycle={json.dumps(settings)}"


def slices(place: Path, **more: Any) -> str:
    """Slices that choose, whose routers' rows nothing is said of: they are made of the run's own text."""
    settings = {
        "source": str(place / "dense"), "experts": 4, "granularity": 2, "method": "virtual_group", "top_k": 2,
        "target": "upcycled", **more,
    }  # fmt: skip
    return f"model.upcycle={json.dumps(settings)}"


def words(place: Path, name: str, model: str, *more: str) -> list[str]:
    data = f"data.train=[{place / 'data'}]"
    return [f"output={place / name}", f"export={place / name}-out", data, *WORDS, model, *more]


def count(counts: Counter[str], function: Any) -> Any:
    def counting(*inputs: Any, **named: Any) -> Any:
        counts[function.__name__] += 1
        return function(*inputs, **named)

    return counting


def asked(place: Path, folder: Path) -> list[Any]:
    out = place / f"{folder.name}-asked"
    assert evaluate(["tiny", str(folder), "limit=3", f"output={out}"]) == 0
    return list(load(out).items)


def losses(folder: Path) -> list[Any]:
    return [(row["step"], row.get("loss"), row.get("grad_norm")) for row in read_metrics(folder)]


def routed(folder: Path, text: Path, **more: str) -> dict[str, Any]:
    config = routing.RoutingConfig(str(folder), (str(text),), tokens=100, sequence=32, **more)  # type: ignore[arg-type]
    return {name: value for name, value in routing.measure(config).items() if name not in ("checkpoint", "start")}


def gone(place: Path) -> None:
    (place / "dense").rename(place / "elsewhere")
    (place / "measured.txt").rename(place / "elsewhere.txt")


@pytest.mark.parametrize(
    ("made", "row", "says"), [(calibrated, "scale", "calibrated"), (slices, "router", "rows clusters")]
)
def test_without_the_dense_model_and_the_text_a_run_resumes_is_asked_and_exports(
    place: Path, made: Callable[[Path], str], row: str, says: str
) -> None:
    model = made(place)
    on_rank(0, 1, words(place, "whole", model))
    first = routed(place / "whole", place / "data.jsonl", start=str(place / "whole"))["layers"][0]
    assert min(first["moved"]) > 0 and 0 < first["router_moved"] < 0.2, "others than the run's first rows"
    shown = facts.plan_rows(place / "whole")
    stopped_on_rank(0, 1, words(place, "parts", model), 4)
    gone(place)
    on_rank(0, 1, words(place, "parts", model))
    assert losses(place / "parts") == losses(place / "whole")
    for file in (place / "whole-out").iterdir():
        assert file.read_bytes() == (place / "parts-out" / file.name).read_bytes(), file.name
    assert {"tokenizer.json", "config.json"} <= {file.name for file in (place / "parts-out").iterdir()}
    assert asked(place, place / "parts") == asked(place, place / "whole-out") != []
    step = place / "parts" / "checkpoints" / "step-00000004"
    assert asked(place, step) == asked(place, place / "parts")
    alone = routed(place / "parts", place / "elsewhere.txt")
    assert alone["granularity"] == 2
    for name in ("load", "together"):
        assert alone[name] == routed(place / "parts-out", place / "elsewhere.txt", granularity=2)[name]  # type: ignore[arg-type]
    assert facts.plan_rows(place / "parts") == shown and says in dict(shown)[row]
    assert f"from {place / 'dense'}" in dict(facts.settings(place / "parts"))["model"]


@pytest.mark.parametrize("more", [[], ["model.random=true"]], ids=["read", "drawn"])
def test_a_run_of_a_checkpoint_stands_alone_too(place: Path, more: list[str]) -> None:
    model = f"model.source={place / 'dense'}"
    on_rank(0, 1, words(place, "whole", model, *more))
    stopped_on_rank(0, 1, words(place, "parts", model, *more), 4)
    gone(place)
    on_rank(0, 1, words(place, "parts", model, *more))
    assert losses(place / "parts") == losses(place / "whole")
    for file in (place / "whole-out").iterdir():
        assert file.read_bytes() == (place / "parts-out" / file.name).read_bytes(), file.name
    assert asked(place, place / "parts") == asked(place, place / "whole-out")


def test_another_wish_is_heard(place: Path) -> None:
    """A config that names another model is no resume of the old one, unless it is allowed: its weights are the
    checkpoint's still."""
    folder, first = place / "run", calibrated(place)
    on_rank(0, 1, words(place, "run", first, "steps=2", "export="))
    other = calibrated(place, top_k=4)
    was = kept(folder).spec
    with pytest.raises(ValueError, match=r"model.upcycle.top_k was 2 and is 4.* resume.allow=\[model.upcycle\]"):
        on_rank(0, 1, words(place, "run", other, "export="))
    assert kept(folder).spec == was
    with pytest.warns(UserWarning, match=r"model.upcycle.top_k was 2 and is 4"):
        on_rank(0, 1, words(place, "run", other, "export=", "resume.allow=[model.upcycle]"))
    now = kept(folder).spec
    assert (was.top_k, now.top_k) == (2, 4)  # type: ignore[union-attr]
    assert not (folder / standalone.FOLDER / standalone.OBSERVED).exists()
    assert [keeps(folder, read_config("", words(place, "run", model)).model) for model in (first, other)] == [
        False,
        True,
    ]


# ---- a start after one that failed


def test_an_observation_on_disk_is_not_made_again(place: Path) -> None:
    """The run fails after text was measured and before its first checkpoint; the same command reads the measurements.
    Another model, text or setting is measured."""
    model = slices(place)

    def measured(*more: str) -> int:
        counts: Counter[str] = Counter()
        with (
            mock.patch.object(measure, "measure", count(counts, measure.measure)),
            mock.patch.object(layout, "load", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            train(read_config("", words(place, "run", model, *more)))
        return counts["measure"]

    assert [measured(), measured(), measured("batch=2", "schedule.peak=1e-2")] == [1, 0, 0]
    assert [measured("model.upcycle.seed=3"), measured("model.upcycle.seed=3")] == [1, 0]
    assert measured() == 1, "a measurement of another seed was taken"
    assert measured("data.seed=9") == 1, "a measurement of other text was taken"
    tiny.make("llama", place / "dense", vocab_size=400, seed=1)
    assert measured("data.seed=9") == 1, "a measurement of another model was taken"
    assert [measured("data.seed=9"), measured()] == [0, 1]

    counts: Counter[str] = Counter()
    with mock.patch.object(measure, "measure", count(counts, measure.measure)):
        again = train(read_config("", words(place, "run", model)))
        fresh = train(read_config("", words(place, "fresh", model)))
    assert counts["measure"] == 1
    assert losses(again) == losses(fresh) and len(losses(again)) == 4


# ---- several ranks


def weights_on_rank(rank: int, world: int, words: list[str]) -> tuple[int, dict[str, torch.Tensor]]:
    """(how often this rank measured, its copy of all weights)."""
    counts: Counter[str] = Counter()
    config = read_config("", words)
    with (
        mock.patch.object(measure, "measure", count(counts, measure.measure)),
        start(config, torch.device("cpu")) as run,
    ):
        begin(run)
        return counts["measure"], {name: held.part.clone() for name, held in layout.pieces(run.model).items()}


def refusal_on_rank(rank: int, world: int, words: list[str]) -> str:
    with mock.patch.object(measure, "measure", side_effect=ValueError("there is no text in it")):
        try:
            with start(read_config("", words), torch.device("cpu")):
                return ""
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("made", [calibrated, slices])
def test_two_ranks_measure_once_and_have_the_same_weights(place: Path, made: Callable[[Path], str]) -> None:
    model = made(place)
    ((_, alone),) = ranks.run(1, weights_on_rank, words(place, "one", model))
    found = ranks.run(2, weights_on_rank, words(place, "two", model, "mesh.dp_replicate=2"))
    assert [measured for measured, _ in found] == [1, 0]
    for _, weights in found:
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)
    saids = ranks.run(2, refusal_on_rank, words(place, "three", model, "mesh.dp_replicate=2"))
    assert saids == ["rank 0 could not measure: there is no text in it"] * 2


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ([], "clusters"),
        (["data.train=[]", "data.stream=nowhere.jsonl"], "normal"),
    ],
)
def test_first_rows_are_clusters_of_the_text_that_a_run_reads_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], rows: str
) -> None:
    config = read_config("", words(place, "run", slices(place), *more))
    with parts.source(config) as origin:
        assert origin.plan is not None and origin.plan.config.router.init.name == rows
    if rows == "normal":
        return
    monkeypatch.setattr(opening, "LEAST", 480)  # the run reads 384: 4 steps of 4 samples of 24
    with start(config, torch.device("cpu")) as run:
        begin(run)
        ids = open_training(config.data, run.origin.dense.vocab).batch(0, 20).tokens
        assert run.origin.plan is not None and ids.shape == (20, 24)
        plan, sources = run.origin.plan, [Checkpoint.open(str(place / "dense"))]
        for view in observe.walk(plan.dense, measure.reader(plan, sources), ids, quiet=True):
            want = clusters.rows({view.layer: view.router_input}, 4, 0)[view.layer]
            assert torch.equal(run.model.get_parameter(f"layers.{view.layer}.ffn.router.weight")[::2], want)


def test_text_that_a_config_names_is_read_instead(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "first_tokens", mock.Mock(side_effect=AssertionError))
    named = {"texts": [str(place / "measured.txt")], "tokens": 128, "sequence": 32}
    with start(read_config("", words(place, "run", slices(place, calibration=named))), torch.device("cpu")) as run:
        assert run.origin.plan is not None and run.origin.plan.config.router.init.name == "clusters"


@pytest.mark.parametrize("made", [calibrated, slices])
def test_the_plan_of_memory_measures_nothing(place: Path, made: Callable[[Path], str]) -> None:
    source = parts.source(read_config("", words(place, "run", made(place))))
    with mock.patch.object(measure, "measure", side_effect=AssertionError), source as origin:
        assert origin.spec.experts == 8  # type: ignore[union-attr]


def test_a_link_in_a_runs_folder_leads_to_no_other_folder(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / standalone.FOLDER).symlink_to(other)
    model = ModelConfig(source=str(place / "dense"))
    with (
        layout.opened(place / "dense") as origin,
        pytest.raises(ValueError, match=r"origin is a link, .* files of .*other; remove the link"),
    ):
        standalone.keep(tmp_path / "run", origin, model)
    assert [path.read_text() for path in other.iterdir()] == ["mine"]
