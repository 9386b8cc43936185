"""What to make of a model, so many GPUs and so many tokens: three arms that fit, and commands that run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.test_docs import LLAMA3, shaped
from tests.parity import tiny
from training.config.reading import read_config
from training.estimating import hardware
from training.estimating.mappings import ranked
from training.estimating.memory import memory
from training.estimating.recommend import GAINS, RecommendConfig, recommend
from training.estimating.seconds import step
from training.run.parts import source
from upcycle.__main__ import main

CARD = hardware.read("h100")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaped(tmp_path_factory.mktemp("llama") / "llama3-8b", LLAMA3)


@pytest.fixture(scope="module")
def of_8_h100(llama: Path) -> str:
    return recommend(RecommendConfig(str(llama), "8xh100", "10B"))


def train_words(said: str) -> list[str]:
    """The words of the command that trains."""
    return shlex.split(next(line for line in said.splitlines() if line.startswith("upcycle train ")))[2:]


def test_the_command_it_prints_is_the_row_it_shows(of_8_h100: str) -> None:
    said = of_8_h100
    rows = {line.split()[0]: line for line in said.splitlines() if line.split()[:1] and line.split()[0] in GAINS}
    assert list(rows) == ["dense", "slices", "copies"] and all(GAINS[name] in rows[name] for name in rows)
    assert "4 copies of 4 slices, top-4" in rows["slices"] and "24.9 B   1.00x" in rows["slices"]
    name, *words = [word for word in train_words(said) if not word.startswith("nproc=")]
    config = read_config(name, words)
    assert config.steps * config.batch * config.data.sequence == pytest.approx(1e10, rel=0.01)
    with source(config) as origin:
        size = memory(origin.spec, config, 8)
        hours = step(origin.spec, config, 8, CARD).total * config.steps / 3600
        tried = [replace(config, micro_batch=n, model=replace(config.model, recompute="full")) for n in (1, 2, 4)]
        fastest = min(fit[0].seconds.total for each in tried if (fit := ranked(origin.spec, each, 8, CARD)[0]))
    assert f"{size.total / 1e9:10.0f}{hours:9.1f}" in rows["slices"]
    assert hours < 1.03 * fastest * config.steps / 3600, "of all that fit, the fastest"


def test_fewer_copies_are_recommended_only_where_more_do_not_fit(llama: Path, of_8_h100: str) -> None:
    assert "8 copies of 4" in recommend(RecommendConfig(str(llama), "8xh200", "10B"))
    assert " 4 copies of 4" in of_8_h100
    said = recommend(RecommendConfig(str(llama), "1xh100", "1B"))
    assert said.count("does not fit: it takes at least") == 3 and "Nothing fits: take more GPUs" in said
    assert "upcycle train" not in said


def test_the_command_names_the_source_that_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = tiny.make("llama", tmp_path / "dense")
    assert main(["recommend", str(dense), "gpus=2xh200", "tokens=1M", "sequence=32"]) == 0
    said = capsys.readouterr().out
    assert "16 copies of 4" in said  # all fit
    words = train_words(said)
    assert words[0] == "slices" and f"model.upcycle.source={dense}" in words and "nproc=2" in words
    assert main(["recommend", str(tiny.make("mixtral", tmp_path / "moe")), "gpus=2xh200", "tokens=1M"]) == 2
    assert "mixture of experts already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpus=8xh100", "tokens=1B"], "source is missing; write"),
        (["source=SOURCE", "tokens=1B"], "gpus is ''; write a number and a card, for instance gpus=8xh100"),
        (["source=SOURCE", "gpus=8", "tokens=1B"], "gpus is '8'"),
        (["source=SOURCE", "gpus=8xh900", "tokens=1B"], "there is no card 'h900'.*did you mean"),
        (["source=SOURCE", "gpus=8xh100"], "tokens is missing; write how many"),
        (["source=SOURCE", "gpus=8xh100", "tokens=lots"], 'tokens is .lots.; write for instance tokens="100B tokens"'),
        (
            ["source=SOURCE", "gpus=8xh100", "tokens=5 GPU-hours"],
            'tokens is .*; write for instance tokens="100B tokens"$',
        ),
        (["source=SOURCE", "gpus=8xh100", "tokens=12"], "tokens is '12'; write at least 65,536"),
        (["source=SOURCE", "gpus=8xh100", "tokens=1B", "sequence=99999"], "sequence is 99999, and the model's context"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], says: str, llama: Path) -> None:
    from upcycle.config.reading import read

    with pytest.raises(ValueError, match=says):
        recommend(read(RecommendConfig, "", [word.replace("SOURCE", str(llama)) for word in words]))
