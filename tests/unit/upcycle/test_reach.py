"""What a stranger's file may not reach: the environment, files beside it, kernels of the hub, the terminal."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from training.checkpoint import standalone
from upcycle.__main__ import main
from upcycle.config.reading import build, read
from upcycle.config.schema import UpcycleConfig
from upcycle.converting import card
from upcycle.io.checkpoint import MAX_COPIED, Checkpoint
from upcycle.io.publish import digest
from upcycle.text.streamed import built

SECRET = "hf_a-secret-of-the-environment"
ASKED = "x/${oc.env:CANARY}"
FORGED = "checked              sizes, sha256 and values are right"
EVIL = f"x\x1b[2J\x07\r\n{FORGED}\u2028{FORGED}\u202e"


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", SECRET)


# ---- the environment


def test_values_are_literal_whatever_they_look_like() -> None:
    """100 random texts of all that means something to OmegaConf come out of `build` as they went in."""
    chance = random.Random(0)
    parts = ["\\", "$", "{", "}", "${", "oc.env:CANARY", "a", ":", "'", '"', "\n", "[", ",", " ", "\\${"]
    texts = [ASKED, *("".join(chance.choices(parts, k=chance.randrange(12))) for _ in range(100))]
    found = build(UpcycleConfig, {"donors": texts, "method": {"name": texts}, "router": {"init": {"texts": texts}}})
    assert found.donors == found.router.init.texts == tuple(texts) and found.method == {"name": texts}
    with pytest.raises(ValueError, match="it must be a whole number") as refused:
        build(UpcycleConfig, {"top_k": "${oc.env:CANARY}"})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [ASKED, "${oc.${k}:CANARY}", "${oc.decode:'${oc.env:CANARY}'}", "a ${oc.create:{}} b", "\\\\${oc.env:HOME}"],
)
def test_a_config_file_asks_for_other_keys_alone(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps({"source": value, "target": "env"}))
    with pytest.raises(ValueError, match="a file may only refer to another key"):
        read(UpcycleConfig, str(file))
    file.write_text("source: llama\noutput: ${source}-moe\ndonors: ['${output}/a']\n")
    config = read(UpcycleConfig, str(file), ["source=${oc.env:CANARY}"])  # typed: asked for
    assert (config.output, config.donors) == (f"{SECRET}-moe", (f"{SECRET}-moe/a",))
    file.with_suffix(".json").write_text(json.dumps({"source": value, "output": "${source}"}))
    config = read(UpcycleConfig, str(file.with_suffix(".json")), values=[("target", value)])
    assert (config.source, config.output, config.target) == (value, "${source}", value)


# ---- files


def donor(llama: Path, folder: Path, link: str = "") -> Path:
    """A folder with a token beside it, to which the file `link` leads."""
    shutil.copytree(llama, folder / "dense")
    (folder / "token").write_text(SECRET)
    if link:
        (folder / "dense" / link).unlink(missing_ok=True)
        (folder / "dense" / link).symlink_to("../token")
    return folder / "dense"


@pytest.mark.parametrize("link", ["tokenizer.json", "vocab.txt", "generation_config.json"])
def test_a_link_to_elsewhere_is_not_published(
    llama: Path, tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = donor(llama, tmp_path, link)
    assert main(["convert", f"source={dense}", f"output={tmp_path / 'moe'}", "experts=2"]) == 2
    assert f"{link} is a link to {tmp_path / 'token'}, outside of its folder" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "token"]  # nothing was begun


def test_links_inside_of_the_folder_and_into_the_hubs_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    dense = donor(llama, tmp_path)
    (dense / "real.json").write_text("{}")
    (dense / "vocab.json").symlink_to("real.json")
    (dense / "secret.model").write_text("x")  # no name that a tokenizer has
    cached = tmp_path / "models--org--name" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    shutil.copytree(dense, cached, symlinks=True)
    (cached / "vocab.json").unlink()
    (cached.parents[1] / "blobs").mkdir()
    (cached.parents[1] / "blobs" / "1").write_text("{}")
    (cached / "vocab.json").symlink_to("../../blobs/1")
    for folder in (dense, cached):
        with Checkpoint.open(folder) as checkpoint:
            names = {file.name for file in checkpoint.copied_files()}
            assert "vocab.json" in names and "secret.model" not in names
    (cached / "vocab.txt").symlink_to("../../../token")
    (dense / "merges.txt").symlink_to("nowhere")
    for folder, says in ((cached, "outside of its folder"), (dense, "is missing, or not a regular file")):
        with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match=says):
            checkpoint.copied_files()


def test_files_that_are_huge_or_no_files_are_not_published(llama: Path, tmp_path: Path) -> None:
    dense = donor(llama, tmp_path)
    os.mkfifo(dense / "merges.txt")
    with Checkpoint.open(dense) as checkpoint:
        assert "merges.txt" not in {file.name for file in checkpoint.copied_files()}
    with open(dense / "vocab.txt", "wb") as file:
        file.truncate(MAX_COPIED + 1)  # a hole: it takes no room
    with Checkpoint.open(dense) as checkpoint, pytest.raises(ValueError, match=f"more than {MAX_COPIED} bytes is not"):
        checkpoint.copied_files()


@pytest.mark.parametrize("name", ["tokenizer.json", "upcycle.json", "../token"])
def test_an_export_takes_over_no_more_than_a_runs_own_files(llama: Path, tmp_path: Path, name: str) -> None:
    run, secret = tmp_path / "run" / "origin", tmp_path / "token"
    run.mkdir(parents=True)
    secret.write_text(SECRET)
    shutil.copy(llama / "config.json", run)
    (run / Path(name).name).symlink_to(secret)
    (run / "origin.json").write_text(json.dumps({"model": {"upcycle": None}, "files": [name], "plan": []}))
    with pytest.raises(ValueError, match=r"is a link to|which an export must not copy"):
        standalone.kept(run.parent)


# ---- kernels


def test_verify_runs_no_kernel_that_a_config_names(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    for name in ("load_and_register_attn_kernel", "lazy_load_kernel"):
        if hasattr(hub, name):
            monkeypatch.setattr(hub, name, lambda *_, **__: pytest.fail("a kernel was fetched"))
    dense = donor(llama, tmp_path)
    config = json.loads((dense / "config.json").read_text())
    named = {"attn_implementation": "org/kernel", "experts_implementation": "sonicmoe"}
    named |= {f"_{key}": value for key, value in named.items()}
    (dense / "config.json").write_text(json.dumps(config | named))
    with Checkpoint.open(dense) as checkpoint:
        model = built(checkpoint, torch.float32, "")
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation != "sonicmoe"


# ---- the terminal


def harmless(said: str, lines: int) -> None:
    """No command to a terminal, and no more lines about a check than were meant."""
    assert not [c for c in said if not c.isprintable() and c != "\n"]
    assert sum(line.startswith("checked") for line in said.split("\n")) == lines
    assert "\\x1b[2J\\x07" in said


def test_a_files_text_neither_commands_the_terminal_nor_forges_a_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = tmp_path / "moe"
    assert main(["convert", f"source={llama}", f"output={moe}", "experts=2", "method.name=virtual_group"]) == 0
    files = {name: json.loads((moe / name).read_text()) for name in ("config.json", "upcycle.json")}
    capsys.readouterr()

    (moe / "config.json").write_text(json.dumps(files["config.json"] | {"hidden_size": EVIL, EVIL: EVIL}))
    assert main(["inspect", str(moe), "check=true"]) == 1
    out, err = capsys.readouterr()
    harmless(out, 1)
    assert "\x1b" not in err
    (moe / "config.json").write_text(json.dumps(files["config.json"] | {EVIL: EVIL}))
    assert main(["verify", str(llama), str(moe), "tokens=32"]) == 1
    harmless(capsys.readouterr().out, 0)

    (moe / "config.json").write_text(json.dumps(files["config.json"]))
    bad = {**files["upcycle.json"], "from": EVIL, "plan": EVIL}
    bad["config"] = files["upcycle.json"]["config"] | {"granularity": 1, "method": {"name": "copy", "how": EVIL}}
    bad["promise"] = {"exact": False, "tolerance": 1e9, "reasons": [EVIL]}
    (moe / "upcycle.json").write_text(json.dumps(bad | {"sum": digest(bad)}))
    main(["inspect", str(moe), "check=true"])
    harmless("".join(capsys.readouterr()), 1)
    dense = donor(llama, tmp_path)
    for key in ("hidden_act", "model_type"):
        (dense / "config.json").write_text(json.dumps(json.loads((llama / "config.json").read_text()) | {key: EVIL}))
        assert main(["plan", f"source={dense}"]) == 2
        assert "\x1b" not in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "rows", lambda _: [("source", EVIL)])
        harmless(card.table(None), 0)  # type: ignore[arg-type]


def test_markdown_of_a_strangers_text_shows_it_and_does_nothing() -> None:
    evil = "<img src=x> ![p](http://e) [l](http://e) `c` a|b \\[x](http://e)\n# h"
    assert card.inert(evil) == (
        "&lt;img src=x> !\\[p\\](http://e) \\[l\\](http://e) \\`c\\` a\\|b \\\\\\[x\\](http://e)\\\\n# h"
    )
    assert card.inert("arc_easy, acc_norm % (5) *") == "arc_easy, acc_norm % (5) *"


# ---- the bound


def test_the_bound_of_verify_is_not_the_judged_ones(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest that promises 1e9 and is signed again holds no model to it."""
    moe = tmp_path / "moe"
    assert main(["convert", f"source={llama}", f"output={moe}", "experts=2"]) == 0
    file = moe / "upcycle.json"
    manifest = json.loads(file.read_text())
    manifest["promise"]["tolerance"] = 1e9
    file.write_text(json.dumps(manifest | {"sum": digest(manifest)}))
    capsys.readouterr()
    assert main(["verify", str(llama), str(moe), "tokens=32"]) == 1
    said = capsys.readouterr().out
    assert "has a different promise than its plan" in said and "up to 1e-09" in said
