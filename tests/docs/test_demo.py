"""Parts of `make demo`; as a whole it is run by test_notebooks.py, which shows what it makes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from evaluation.studies import sample
from examples import demo


def test_side_by_side_each_says_its_name_and_one_that_fails_stops_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demo.side_by_side("json.tool", {"a": ["--help"], "b": ["-h"]})
    lines = capsys.readouterr().out.splitlines()
    for name in "ab":
        assert any(line.startswith(f"{name:>8} | usage") for line in lines)
    with pytest.raises(demo.Stopped) as stopped:
        demo.side_by_side("json.tool", {"a": ["--help"], "b": ["--nonsense"]})
    assert stopped.value.args == (2,)


def test_a_signal_ends_all_that_run_side_by_side(tmp_path: Path) -> None:
    """Not only the demo: they would go on writing where a second demo wants to."""
    begun = [tmp_path / "a", tmp_path / "b"]
    work = [
        f"open({str(file)!r}, 'w').write(str(__import__('os').getpid())); __import__('time').sleep(60)"
        for file in begun
    ]

    def interrupt() -> None:
        while not all(file.is_file() and file.read_text() for file in begun):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    sender = threading.Thread(target=interrupt)
    sender.start()
    start = time.monotonic()
    with pytest.raises(demo.Stopped):
        demo.side_by_side(
            "timeit", {file.name: ["-n", "1", "-r", "1", code] for file, code in zip(begun, work, strict=True)}
        )
    sender.join()
    assert time.monotonic() - start < 50
    for file in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_file_is_both_learned_and_held_out(tmp_path: Path) -> None:
    config = sample.SampleConfig(output=str(tmp_path), characters=60_000, held_out=8_000)
    sample.gather(tmp_path, config)
    for domain in sample.DOMAINS:
        train, valid = (
            {json.loads(line)["text"] for line in (tmp_path / "text" / part / f"{domain}.jsonl").open()}
            for part in ("train", "valid")
        )
        assert 20_000 < sum(map(len, train)) <= 60_000
        assert 3_000 < sum(map(len, valid)) <= 8_000, domain
        # but for the three lines that many test files end with
        assert not {piece for piece in train & valid if len(piece) > 60}
