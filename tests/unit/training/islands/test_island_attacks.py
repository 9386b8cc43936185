"""Attack a server of islands by damaged folders, harmful islands and strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import islands
from tests.islands import HEAD, LAYOUT, Islander, flips, poisons, serving, used
from training.islands import center
from training.islands.journal import Journal
from training.islands.link import frames, wire
from training.islands.link.frames import Refused
from training.islands.sparse import Sparse

# ---- the folder


def test_a_changed_bit_is_named_and_loses_nothing(tmp_path: Path) -> None:
    """Run a slice of `python -m tests.islands --flips 150`."""
    assert flips(tmp_path, 24, seed=1) == {"named": 12, "replaced": 12, "cut": 0, "silent": 0}


def test_a_torn_end_is_cut_off_after_the_log_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used(tmp_path)
    log = tmp_path / "log-2"
    whole = log.read_bytes()
    log.write_bytes(whole + bytes(100))  # as a file that was made longer and not written
    islands.kept(tmp_path)
    aside = tmp_path / f"log-2.torn-{len(whole)}"
    assert log.read_bytes() == whole and aside.read_bytes() == whole + bytes(100)
    assert f"{log} ended in a record of 100 bytes that was not written to its end" in capsys.readouterr().err


def test_a_missing_log_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    used(tmp_path)
    (tmp_path / "log-2").unlink()
    with pytest.raises(ValueError, match="log-2 is missing; restore"):
        islands.kept(tmp_path)


def test_a_damaged_snapshot_without_one_before_it_is_an_error(tmp_path: Path) -> None:
    used(tmp_path)
    for path in (tmp_path / "snapshot-1.safetensors", tmp_path / "snapshot-2.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match=r"snapshot-1.safetensors does not have the sum that .*log-1 holds; restore"):
        islands.kept(tmp_path)


def test_an_island_that_is_refused_is_not_in_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, most=1) as server:
        Islander("a", server.port, 9).join()
        with pytest.raises(Refused, match=r"1 islands are here, and islands.most allows no more"):
            Islander("b", server.port, 9).join()
    with serving(tmp_path, most=1) as server:  # it was, and no server could begin with this log
        assert list(server.center.members) == ["a"]


# ---- islands that harm


def test_a_healthy_island_goes_on_next_to_harmful_ones(tmp_path: Path) -> None:
    """Run a slice of `python -m tests.islands --poison 50`."""
    with serving(tmp_path) as server:
        found = poisons(server, len(islands.POISON), seed=1)
        assert found["quarantined"] == 4 and found["harmless"] == 3, found  # the server has its own bias_rate
        model = server.center.rule.model.clone()
    with serving(tmp_path) as server:
        assert torch.equal(server.center.rule.model, model)
        with pytest.raises(Refused, match=r"island bad-16 is in quarantine, because .* moves? .*; mend it, and start"):
            Islander("bad-16", server.port, 9).join()


def pushed(journal: Journal, name: str, seq: int, value: float) -> None:
    index = torch.arange(seq, LAYOUT.size, 7) if value else torch.zeros(0, dtype=torch.int64)
    data = center.join(HEAD, wire.encode(Sparse(index, torch.full((len(index),), value)), LAYOUT.size))
    journal.add(frames.PUSH, name, seq, data)


@pytest.mark.parametrize("rule", ["dgs", "diloco"])
@pytest.mark.parametrize("restarts", [False, True])
def test_quarantine_takes_back_what_an_island_pushed(tmp_path: Path, rule: str, restarts: bool) -> None:
    """Compare the model with that of an island that pushed nothing in the same rounds."""

    def model(folder: Path, value: float) -> Any:
        here, journal, server = islands.made(folder, rule=rule)
        server.close()
        for name in ("a", "bad"):
            journal.add(frames.JOIN, name)
        for seq in range(1, 5):
            pushed(journal, "a", seq, 0.25)
            pushed(journal, "bad", seq, value)
        journal.quarantine("bad", "it harms")
        pushed(journal, "a", 5, 0.5)
        if restarts:
            journal.close()
            here, journal, server = islands.made(folder, rule=rule)
            server.close()
        journal.close()
        assert here.members["bad"].bad == "it harms" and not here.members["bad"].here
        return here.rule.model

    torch.testing.assert_close(model(tmp_path / "harm", 0.5), model(tmp_path / "none", 0.0))


def test_an_island_has_the_settings_of_its_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.agreed = {"schedule.peak": 1e-3}
        one = Islander("a", server.port, 9)
        one.link.who["agreed"] = {"schedule.peak": 1.0}
        with pytest.raises(Refused, match=r"island a has schedule.peak=1.0, and the server has 0.001; start both with"):
            one.join()
        assert not server.center.members
        one.link.who["agreed"] = dict(server.agreed)
        one.join()
