"""What can be known to be wrong before a model is made is said before a model is made."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_data import make_tokenizer
from tests.unit.training.test_train import WORDS, config, moe, place
from training.__main__ import main
from training.config.reading import read_config
from training.run import session
from training.run.loop import train
from training.run.preflight import preflight
from upcycle.text import measure

__all__ = ["place"]  # a fixture


class Reached(AssertionError):
    """A model is being made."""


WRONG = {
    "no output": (["output="], "output is not set"),
    "no data": (["data.train=[]"], "name folders under data.train"),
    "data path": (["data.train=[nowhere]"], "there is no folder nowhere with token shards"),
    "valid path": (["data.valid=[nowhere]"], "there is no folder nowhere with token shards"),
    "a cut shard": (["data.train=[{tmp}/cut]"], "prepare or copy it again"),
    "warm-up": (["schedule.warmup=8"], "is not below steps=8"),
    "suite": (["eval.every=1", "eval.suite=tinny", "eval.tokenizer={place}/words"], "there is no suite 'tinny'"),
    "suite's texts": (["eval.every=1", "eval.texts=[a.txt]", "eval.tokenizer={place}/words"], "takes no texts"),
    "suite's tokenizer": (["eval.every=1"], "has no tokenizer"),
    "suite on a pipeline": (["eval.every=1", "mesh.pp=2"], "eval.every=1 does not go with mesh.pp=2"),
    "suite's limit": (["eval.limit=-1"], "eval.limit is -1; it must be at least 0"),
    "tensorboard": (["log.to=tensorboard"], 'the package tensorboard is not installed; pip install "upcycle[logs]"'),
    "wandb": (["log.to=[jsonl,wandb]"], 'the package wandb is not installed; pip install "upcycle[logs]"'),
    "mlflow": (
        ["log.to=[mlflow]"],
        'the package mlflow is not installed; pip install "upcycle[logs]", or leave mlflow',
    ),
    "trackio": (["log.to=[trackio]"], "log.to names trackio, but the package trackio is not installed; pip install"),
    "a tracker": (["log.to=[jsonl,tensorbord]"], "log.to names 'tensorbord'; did you mean 'tensorboard'?"),
    "no project": (["log.project="], "log.project is ''; it must be a name"),
    "an old tracker": (["log.tensorboard=true"], "unknown key 'log.tensorboard'; write log.to=[tensorboard]"),
    "an old project": (["log.wandb=mine"], "unknown key 'log.wandb'; write log.to=[wandb] log.project=PROJECT"),
    "export is there": (["export={place}/tokenizer"], "exists already; remove it or choose another folder"),
    "export is the source": (["export={place}/dense"], "is the same as the input {place}/dense"),
    "export is the data": (["export={place}/data"], "is the same as the input {place}/data"),
    "export has the source": (["export={place}"], "contains the input {place}/dense"),
    "output in a file": (["output={place}/data.jsonl/run"], "data.jsonl is a file; choose another folder"),
    "export in a file": (["export={place}/data.jsonl/out"], "data.jsonl is a file; choose another folder"),
    "keep": (["checkpoint.keep=0"], "checkpoint.keep is 0; it must be at least 1"),
    "every": (["checkpoint.every=-1"], "checkpoint.every is -1; it must be at least 0"),
    "keep every": (["checkpoint.keep_every=-2"], "checkpoint.keep_every is -2; it must be at least 0"),
    "across machines": (
        ["mesh.ep=4", "mesh.dispatcher=nvlink"],
        "mesh.ep=4 spans machines of 2 ranks; write mesh.ep=2",
    ),
    "arrivals": (["mesh.arrivals=0.5"], "mesh.arrivals is 0.5; it must be at least 1"),
    "device": (["device=gpu"], "device is 'gpu'; it must be cuda or cpu"),
    "a key": (["stepz=3"], "did you mean 'steps'"),
    "a key of a part": (["optim.nme=adamw"], "did you mean 'name'"),
    "an old key": (["model.experts=grouped"], "unknown key 'model.experts'; write model.expert_backend"),
    "another old key": (["model.compute=float32"], "unknown key 'model.compute'; write model.dtype"),
    "no number": (["steps=many"], "steps"),
    "no steps": (["steps=0"], "steps is 0; it must be at least 1"),
    "micro-batch": (["micro_batch=3"], "try micro_batch=2"),
    "two models": (["model.source=x"], "both are set"),
    "no model": (["model.upcycle="], "neither is set"),
    "dtype": (["model.dtype=int8"], "bfloat16, float32, float64"),
    "backend": (["model.expert_backend=grouped_gemn"], "did you mean 'grouped_gemm'"),
    "backend of this machine": (["model.expert_backend=transformer_engine"], "transformer_engine"),
    "scope": (["balance.aux_scope=all"], "micro_batch, sequence, global"),
    "experts on ranks": (["mesh.ep=3"], "mesh.ep * etp * pp is 3, which does not divide the 1 ranks; try mesh.ep=1"),
    "matrices on ranks": (["mesh.tp=2"], "which does not divide the 1 ranks; try mesh.tp=1"),
    "context": (
        ["data.sequence=256"],
        "data.sequence=256 is longer than the model's context of 128 tokens",
    ),
    "context of a stage": (
        ["stages=[{{steps: 4}},{{steps: 4, data: {{sequence: 129}}}}]"],
        "data.sequence=129 is longer than the model's context of 128 tokens",
    ),
    "profile": (["profile=3-1"], "write the steps to trace, such as 10-12"),
    "recompute": (["model.recompute=all"], "none, selective, attention, experts, full"),
    "frozen": (["model.frozen=int8"], "model.frozen is 'int8'; it must be one of bfloat16, float32, nf4, or left out"),
}


def test_meshes_of_several_ranks_are_refused_before_they_meet(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no process but this one: whoever waits for the others, or reads text for them, does not return."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(measure, "measure", lambda *_, **__: pytest.fail("text was measured"))
    slices = moe(place) | {"router": {"init": {"name": "clusters"}}}
    for words, says in (
        (["mesh.ep=3"], "is 3, which does not divide the 4 ranks; try mesh.ep=4"),
        (["mesh.tp=4"], "mesh.tp=4 does not divide the 2 key/value heads; try mesh.tp=2"),
        (["mesh.pp=4"], "mesh.pp=4 stages need as many layers, and this model has 2; try mesh.pp=2"),
        (["mesh.pp=2", "mesh.schedule=interleaved"], "makes 4 stages, and the model has 2 layers; try mesh.pp=1"),
        (["batch=6", "micro_batch=2"], "sequences on 4 data-parallel ranks; try batch=8"),
        (["mesh.ep=2", "mesh.cp=4", "data.sequence=20"], "20 tokens cannot be cut into 2 * mesh.cp * tp = 8 pieces"),
        (["mesh.ep=4", "mesh.cp=2", "teacher.weight=1", "mesh.etp=2"], "is 8, which does not divide the 4 ranks"),
    ):
        given = config(place, tmp_path / "run", f"model.upcycle={json.dumps(slices)}", "batch=8", *words)
        with pytest.raises(ValueError, match=re.escape(says)):
            train(given)
    assert not (tmp_path / "run").exists()


def test_a_context_may_be_left_where_the_rope_or_the_run_says_so(place: Path, tmp_path: Path) -> None:
    """A rope that is stretched makes the context longer, and a run that has begun goes on."""
    shutil.copytree(place / "dense", tmp_path / "dense")
    file = tmp_path / "dense" / "config.json"
    plain = json.loads(file.read_text())

    def sequence(length: int, **rope: Any) -> None:
        file.write_text(json.dumps({**plain, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **rope}}))
        words = [
            "model.upcycle=",
            f"model.source={tmp_path / 'dense'}",
            "balance.bias_rate=0",
            f"data.sequence={length}",
        ]
        preflight(config(place, tmp_path / "run", *words))

    for length, rope in (
        (128, {}),
        (256, {"rope_type": "linear", "factor": 2.0}),
        (512, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    ):
        sequence(length, **rope)
        with pytest.raises(
            ValueError, match=f"data.sequence={length + 1} is longer than the model's context of {length} tokens"
        ):
            sequence(length + 1, **rope)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    sequence(129)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_said_before_the_model_is_made(
    place: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(session, "start", reached)
    for package in ("tensorboard", "wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    shutil.copytree(place / "data", tmp_path / "cut")
    tokens = next((tmp_path / "cut").glob("tokens*"))
    tokens.write_bytes(tokens.read_bytes()[:-2])
    (place / "words").mkdir(exist_ok=True)
    shutil.copy(place / "tokenizer" / "tokenizer.json", place / "words")
    more, says = WRONG[name]
    if name == "across machines":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    given = [
        f"data.train=[{place / 'data'}]", f"output={tmp_path / 'run'}", "steps=8", *WORDS,
        f"model.upcycle={json.dumps(moe(place))}",
    ]  # fmt: skip
    with pytest.raises(Reached):
        main(given)  # nothing is wrong with these
    assert main([*given, *(word.format(place=place, tmp=tmp_path) for word in more)]) == 2
    said = capsys.readouterr().err
    assert says.format(place=place) in said and said.count("upcycle: ") == 1 and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused_and_of_the_same_ids_is_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(session, "start", reached)
    own = make_tokenizer(Path(shutil.copytree(place / "dense", tmp_path / "own")), bos=True)  # another file, same ids
    other = Path(shutil.copytree(own, tmp_path / "other"))
    stored = json.loads((own / "tokenizer.json").read_text())
    names = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    long = [name for name in names if len(name) > 1 and not name.startswith("<")]
    swapped = dict(zip(long, reversed(long), strict=True))
    stored["model"]["vocab"] = {swapped.get(name, name): id for id, name in enumerate(names)}
    (other / "tokenizer.json").write_text(json.dumps(stored))
    words = [f"data.train=[{place / 'data'}]", f"output={tmp_path / 'run'}", "steps=8", *WORDS, "balance.bias_rate=0"]
    for trained in ([f"model.source={own}"], [f"model.source={other}", "model.random=true"]):
        with pytest.raises(Reached):
            main([*words, *trained])
    assert main([*words, f"model.source={other}"]) == 2
    said = capsys.readouterr().err
    assert f"{place / 'data'} was made with another tokenizer than the model's" in said
    assert "prepare it with the model's own tokenizer" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("lora_r=8", "lora.rank"), ("lora.r=8", "lora.rank"), ("adapter=lora", "lora.rank"),
        ("lora.target_modules=[q_proj]", "lora.match"), ("lora_alpha=16", "lora.alpha"), ("optimizer=adamw", "optim.name"),
        ("load_in_4bit=true", "model.frozen=nf4"), ("base_model=./llama", "model.source or model.upcycle.source"),
        ("output_dir=runs/a", "output"), ("sequence_len=512", "data.sequence"), ("micro_batch_size=2", "micro_batch"),
        ("max_steps=9", "steps"), ("deepspeed=zero3.json", "mesh"), ("save_total_limit=2", "checkpoint.keep"),
        ("warmup_ratio=0.1", "schedule.warmup"), ("datasets=[a]", "data.train"), ("resume_from_checkpoint=a", "nothing; the"),
    ],
)  # fmt: skip
def test_keys_of_other_trainers_name_ours(word: str, ours: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown key '{word.partition('=')[0]}'; write {re.escape(ours)}"):
        read_config("", [word])
