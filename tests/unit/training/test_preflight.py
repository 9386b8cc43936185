"""What can be known to be wrong before a model is made is said before a model is made."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.training.test_train import WORDS, moe, place
from training.__main__ import main
from training.run import session

__all__ = ["place"]  # a fixture


class Reached(AssertionError):
    """A model is being made."""


WRONG = {
    "no output": (["output="], "output is not set"),
    "no data": (["data.train=[]"], "name folders under data.train"),
    "data path": (["data.train=[nowhere]"], "there is no folder nowhere of token shards"),
    "valid path": (["data.valid=[nowhere]"], "there is no folder nowhere of token shards"),
    "a cut shard": (["data.train=[{tmp}/cut]"], "prepare or copy it again"),
    "warm-up": (["schedule.warmup=8"], "leaves nothing of 8 steps"),
    "suite": (["eval.every=1", "eval.suite=tinny", "eval.tokenizer={place}/words"], "there is no suite 'tinny'"),
    "suite's texts": (["eval.every=1", "eval.texts=[a.txt]", "eval.tokenizer={place}/words"], "takes no texts"),
    "suite's tokenizer": (["eval.every=1"], "has no tokenizer"),
    "suite on a pipeline": (["eval.every=1", "mesh.pp=2"], "eval.every=1 does not go with mesh.pp=2"),
    "suite's limit": (["eval.limit=-1"], "eval.limit is -1; it must be at least 0"),
    "tensorboard": (["log.tensorboard=true"], "tensorboard is asked for but not installed"),
    "wandb": (["log.wandb=mine"], "wandb is asked for but not installed"),
    "export is there": (["export={place}"], "exists already; remove it or choose another folder"),
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
    "profile": (["profile=3-1"], "write the steps to trace, such as 10-12"),
    "recompute": (["model.recompute=all"], "none, selective, attention, experts, full"),
    "frozen": (["model.frozen=int8"], "model.frozen is 'int8'; it must be bfloat16 or float32, or left out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_said_before_the_model_is_made(
    place: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(session, "start", reached)
    for package in ("tensorboard", "wandb"):
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
    assert says in said and said.count("upcycle: ") == 1 and "Traceback" not in said
    assert not (tmp_path / "run").exists()
