"""A resume says key by key what is no longer as it was, refuses what would silently mean something else, and until it is
accepted writes nothing."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_train import config, place
from training.checkpoint.storage import read_manifest
from training.config.reading import read_config
from training.config.resume import REFUSED, ResumeConfig, compared, flat, judge
from training.run.loop import train
from training.run.saving import settings_of

__all__ = ["place"]  # a fixture
CHECKPOINT = Path("checkpoints/step-00000003")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return train(config(place, place / "resumed", "valid_every=0", steps=3))


QUIET = {
    "output", "export", "push", "checkpoint.mirror", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every",
    "checkpoint.last", "checkpoint.asynchronous", "log.to", "log.project", "log.name", "log_every", "valid_every", "profile", "memory_snapshot", "device", "patience",
    "data.valid", "resume.allow", "optim.skips", "lora.export", "islands.join", "islands.secret", "islands.certificate",
    "islands.authority", "islands.throttle", "islands.patience", "islands.listen", "islands.count", "islands.most",
    "stages",
}  # fmt: skip


def test_every_key_is_quiet_said_or_refused() -> None:
    given = read_config("", ["model.source=a"])
    now = settings_of(given)
    every = {key for key in flat(json.loads(json.dumps(asdict(given)))) if not key.startswith(("eval.", "mesh."))}
    assert every - now.keys() == QUIET and now.keys() <= every and len(now) > 40
    for key in now:
        before = {**now, key: "was"}
        refused = next((name for name in REFUSED if key == name or key.startswith(name + ".")), "")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if refused:
                with pytest.raises(ValueError, match=rf"{key} was was and is .*resume\.allow=\[{refused}\]"):
                    judge(Path("x"), before, now, (), True)
                assert not said
            judge(Path("x"), before, now, (refused,), True)
        assert len(said) == 1 and f"{key} was was and is" in str(said[0].message), key


def test_a_source_of_data_more_is_another_order() -> None:
    one, two = (
        compared({"data": {"train": [{"name": name, "weight": 1.0} for name in names]}}) for names in ("a", "ab")
    )
    with pytest.raises(ValueError, match=r"data.train.1.name was unset and is b"):
        judge(Path("x"), one, two, ["seed"], True)
    judge(Path("x"), two, two, [], True)
    other = {**two, "data.train.1.weight": 3.0}
    with pytest.warns(UserWarning, match=r"other settings: data\.train\.1\.weight was 1\.0 and is 3\.0"):
        judge(Path("x"), two, other, [], True)


@pytest.mark.parametrize(
    ("key", "says"), [("optim.nam", "did you mean 'optim.name'"), ("schedule", "is never refused")]
)
def test_what_may_be_allowed_is_known(key: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ResumeConfig(allow=(key,))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.name=muon"], "optim.name was adamw and is muon"),
        (["model.upcycle.top_k=4", "data.seed=4"], "model.upcycle.top_k was 2 and is 4, data.seed was 3 and is 4"),
    ],
)
def test_a_refused_resume_says_the_keys_and_writes_nothing(place: Path, run: Path, words: list[str], says: str) -> None:
    before = files(run)
    with pytest.raises(ValueError, match=says):
        train(config(place, run, *words, "valid_every=0", steps=5))
    assert files(run) == before


def test_what_is_allowed_goes_on(place: Path, run: Path, tmp_path: Path) -> None:
    """Another rule starts its moments anew, others are kept in the dtype that is asked for; the rest is said."""
    assert read_manifest(run / CHECKPOINT)["settings"]["schedule.peak"] == 1e-3
    weighed = f"data.train=[{{path: {place / 'data'}, weight: 2}}]"
    words = ["valid_every=0", weighed, "optim.moments=bfloat16", "schedule.peak=2e-3", "optim.spike_window=64"]
    allow = "resume.allow=[optim.name,optim.spike_window]"
    with pytest.warns(UserWarning) as said:
        train(config(place, run, *words, "optim.name=muon", allow, steps=5))
    text = " ".join(str(warning.message) for warning in said)
    for key in (
        "optim.name was adamw and is muon",
        "optim.moments was float32 and is bfloat16",
        "schedule.peak was",
        "data.train.0.weight was 1.0",
    ):
        assert key in text
    tensors: dict[str, Any] = read_manifest(run / "checkpoints/step-00000005")["tensors"]
    moments = {name.rpartition(".")[2]: t["dtype"] for name, t in tensors.items() if name.startswith("optimizer.state")}
    assert moments == {
        "momentum": "bfloat16",
        "exp_avg": "bfloat16",
        "exp_avg_sq": "bfloat16",
        "step": "float32",
        "json": "uint8",
    }
