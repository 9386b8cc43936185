"""`make demo` in small: every stage runs, a second run does nothing again, one that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation import demo

TINY = [
    "hidden=32", "layers=2", "first=4", "steps=4", "batch=4", "sequence=64", "characters=30000", "held_out=1500",
    "vocabulary=512",
]  # fmt: skip


def test_the_demo_stops_goes_on_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"output={tmp_path / 'demo'}", *TINY]
    real = demo.call

    def killed(program: str, *more: object) -> None:
        if program == "upcycle":
            raise KeyboardInterrupt
        real(program, *more)

    monkeypatch.setattr(demo, "call", killed)
    assert demo.main(words) == 130
    first = json.loads((tmp_path / "demo" / "done.json").read_text())["stages"]
    assert list(first) == ["text", "start", "tokens", "first"]

    monkeypatch.setattr(demo, "call", real)
    assert demo.main(words) == 0
    done = json.loads((tmp_path / "demo" / "done.json").read_text())["stages"]
    assert {name: done[name] for name in first} == first
    assert len(done) == 18
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert [line[:3] for line in lines] == ["1. ", "2. ", "3. ", "4. ", "5. "]
    page = (tmp_path / "demo" / "report.html").read_text()
    for shown in ("dense", "copies", "groups", "ppl_prose", "tiny_stories", "specialis"):
        assert shown in page

    def never(program: str, *more: object) -> None:
        raise AssertionError(f"{program} {more} again")

    monkeypatch.setattr(demo, "call", never)
    assert demo.main(words) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[-5:] == lines
    assert sum("done before" in line for line in again) == 18

    assert demo.main([*words, "seed=1"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_no_file_is_both_learned_and_held_out(tmp_path: Path) -> None:
    config = demo.DemoConfig(output=str(tmp_path), characters=60_000, held_out=8_000)
    demo.gather(tmp_path, config)
    for domain in demo.DOMAINS:
        train, valid = (
            {json.loads(line)["text"] for line in (tmp_path / "text" / part / f"{domain}.jsonl").open()}
            for part in ("train", "valid")
        )
        assert 20_000 < sum(map(len, train)) <= 60_000
        assert 3_000 < sum(map(len, valid)) <= 8_000, domain
        # but for the three lines that many test files end with
        assert not {piece for piece in train & valid if len(piece) > 60}
