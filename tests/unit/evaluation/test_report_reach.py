"""A report on strangers' folders: no secret of the environment, no fetch, no markup and no picture in any of its files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from evaluation.judge.compare import compare
from evaluation.judge.logged import load
from evaluation.judge.results import Group
from evaluation.show import page
from tests.parity import tiny
from tests.unit.evaluation.test_compare import chosen, log, model, task, write
from tests.unit.evaluation.test_report import Tags, made, routed
from tests.unit.evaluation.written import save
from upcycle.__main__ import main as upcycle
from upcycle.cli import frame

SECRET = "hf_a-secret-of-the-environment"
ASKED = "x/${oc.env:CANARY}"
EVIL = "<script>a</script><img src=x> ![p](http://e) [l](javascript:a) `|\n\n# forged\x1b[2J\u202e"


def test_nothing_is_put_in_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    tiny.make("llama", tmp_path / "dense")
    moe = tmp_path / "moe"
    assert upcycle(["convert", f"source={tmp_path / 'dense'}", f"output={moe}", "experts=2"]) == 0
    manifest = json.loads((moe / "upcycle.json").read_text())
    run = log(tmp_path / "run", 10.0, {0: 5.0, 10: 4.0})
    settings = {
        "model": {"source": ASKED, "dtype": ASKED, "expert_backend": ASKED, "upcycle": ""}, "seed": 0, "batch": 1, "steps": 10,
        "data": {"sequence": 8}, "schedule": {"peak": 1.0, "final": 0.1, "warmup": 0},
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(settings))
    (run / "origin").mkdir()
    origin = {"model": {"upcycle": {"source": ASKED, "max_shard": ASKED}}, "plan": [], "files": []}
    (run / "origin" / "origin.json").write_text(json.dumps(origin))
    for source in (ASKED, "org/model"):
        manifest["config"] |= {"source": source, "dtype": ASKED, "donors": [source]}
        (moe / "upcycle.json").write_text(json.dumps(manifest | {"from": source}))
        page, markdown, data = made(tmp_path, [str(moe), str(run)])
        for text in (page, markdown, json.dumps(data)):
            assert SECRET not in text and "oc.env" in text
    assert "a report does not fetch models" in page


def test_no_file_of_a_report_has_markup_of_others(tmp_path: Path) -> None:
    folders, called = [], EVIL.replace("/", "")  # a task's name is in the name of its file
    for name, answers in (("a", [0, 1]), ("b", [0, 0])):
        found = [replace(chosen(called, i, 0, answer), target=EVIL, choices=(EVIL, "B", "C", "D"), text=EVIL)
                 for i, answer in enumerate(answers)]  # fmt: skip
        part = replace(task(called, 2, groups=("all",)), title=EVIL, version=EVIL)
        folder = write(tmp_path / name, [part], found, [Group("all", EVIL, {"acc": 0.5}, {}, (called,), 2)])
        run = load(folder)
        evil = replace(run, model=replace(model(f"{name}{EVIL}"), kind=EVIL), command=EVIL, suite=EVIL, notes=(EVIL,))
        folders.append(str(save(folder, replace(evil, options={EVIL: EVIL}, versions={EVIL: EVIL}), found)))
    file = routed(tmp_path)
    value = json.loads(file.read_text())
    value |= {
        "checkpoint": EVIL,
        "start": EVIL,
        "tokens": {EVIL: 1},
        "load": {EVIL: value["load"]["law"]},
    }
    file.write_text(json.dumps(value | {"top_k": EVIL}))  # a number, which goes onto the page as it is
    with pytest.raises(ValueError, match=r"top_k is .*it must be a whole number"):
        made(tmp_path, [str(file)])
    file.write_text(json.dumps(value))
    runs = [log(tmp_path / name, 10.0, {0: 5.0, 10: 4.0, 20: 3.0}) for name in ("one", "<b>two")]
    for run_folder in runs:
        text = (run_folder / "metrics.jsonl").read_text()
        (run_folder / "metrics.jsonl").write_text(text.replace("valid/code", "valid/<img src=x>"))
    page, markdown, _ = made(tmp_path, [*folders, str(file), *map(str, runs)], "<script>![p](http)")
    said = str(compare(folders))
    tags = Tags()
    tags.feed(page)
    assert not tags.fetched and not {"script", "img", "b"} & (set(tags.seen) - {"b"}) and "<img" not in page
    assert page.count("<b>") == page.count("<figcaption><b>")  # the caption's own
    for text in (markdown, said):
        assert "&lt;img src=x>" in text and not re.search(r"<\w", text)
        assert not re.search(r"(?<!\\)[\[\]]", text.replace(tmp_path.name, ""))  # no link, no picture
    for text in (markdown, said):
        assert "\x1b" not in text and "\u202e" not in text and not re.search(r"^# forged", text, re.MULTILINE)
    shutil.rmtree(tmp_path / "out")


def test_no_character_commands_the_terminal_or_turns_the_text() -> None:
    """Names of tasks, metrics and models reach the page, the Markdown file and the terminal."""
    said = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\r\x7f"
    pages = (
        page.rendered(page.Page(said, said, (), (said,), ())),
        page.shown(said),
        frame.printable(f"{said}\n", keep="\n"),
    )
    for text in pages:
        assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\r\x7f") and "\\x1b[2J" in text
    assert page.shown("– ½\u00a0× 雨\n\t") == "– ½\u00a0× 雨\n\t"
