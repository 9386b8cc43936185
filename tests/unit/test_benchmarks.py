"""Check that benchmarks/converting.py can call its own functions in a child process, as each of its measurements does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.converting import measure, python


def test_a_measured_child_does_its_work_and_a_failing_one_is_a_sentence(tmp_path: Path) -> None:
    measured = measure(python(f"write_tokenizer(Path({str(tmp_path)!r}))"), tmp_path / "log")
    assert (tmp_path / "tokenizer.json").is_file() and 0 < measured.returned <= measured.on_disk
    with pytest.raises(ValueError, match=r"ended with 1; its log ends with: (?s:.)*no_such_function"):
        measure(python("no_such_function()"), tmp_path / "log")
