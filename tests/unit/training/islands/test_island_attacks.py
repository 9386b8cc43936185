"""Attack a server of islands by damaged folders, harmful islands and strangers."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import islands
from tests.islands import FLOODS, HEAD, LAYOUT, Islander, expected, flips, floods, poisons, serving, used
from tests.unit.training.islands.test_island_server import limit
from training.islands import center
from training.islands.center import Bounds, Center
from training.islands.config import IslandsConfig
from training.islands.journal import Journal
from training.islands.link import frames, wire
from training.islands.link import server as serve
from training.islands.link.frames import Cut, Halted, Refused
from training.islands.sparse import Sparse

__all__ = ["limit"]  # a fixture

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


@pytest.mark.parametrize("rate", [None, "abc", 1e308])
def test_the_routers_move_at_the_servers_own_rate(tmp_path: Path, rate: Any) -> None:
    """Ignore the rate that an island sends; it was in the log before anybody read it."""

    def begun() -> tuple[Center, Journal]:
        bounds = Bounds(rate=0.05, bias_rate=1e-3)
        here = Center(LAYOUT, islands.start(), IslandsConfig(), torch.zeros(2, 4), bounds)
        return here, Journal(tmp_path, here)

    here, journal = begun()
    journal.add(frames.JOIN, "a")
    head = HEAD | {"steps": 20, "loads": [[1, 2, 3, 4]] * 2, "bias_rate": rate}
    body = wire.encode(Sparse(torch.tensor([1]), torch.tensor([0.5])), LAYOUT.size)
    journal.add(frames.PUSH, "a", 1, center.join(head, body))
    with pytest.raises(ValueError, match="loads"):
        journal.add(frames.PUSH, "a", 2, center.join(head | {"loads": [[1, 2], "x"]}, body))
    journal.close()
    again, journal = begun()
    journal.close()
    for each in (here, again):
        torch.testing.assert_close(each.bias, 0.02 * torch.tensor([1.0, 1.0, -1.0, -1.0]).expand(2, 4))


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


# ---- strangers and handles


def test_islands_exchange_and_join_through_crowds_of_strangers(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert floods(server, len(FLOODS), seed=0) == dict.fromkeys(FLOODS, 1)


def test_islands_of_another_address_are_not_shed_by_a_flood(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        pairs = [socket.socketpair() for _ in range(5)]
        hosts = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2", "10.0.0.1"]
        server.strangers = {
            number: serve.Stranger(pair[0], host, time.monotonic() + 60)
            for number, (pair, host) in enumerate(zip(pairs, hosts, strict=True))
        }
        server.make_room(3)
        assert list(server.strangers) == [2, 3, 4]  # the oldest of those that come from the same place
        for one, other in pairs:
            one.close()
            other.close()


def test_a_server_without_handles_accepts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, journal, server = islands.made(tmp_path)

    class Listener:
        left = 3

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def accept(self) -> Any:
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

    real, server.listener = server.listener, Listener()  # type: ignore[assignment]
    thread = threading.Thread(target=server.run, args=(lambda: False,), daemon=True)
    thread.start()
    Islander("a", server.port, 9).join()
    server.close()
    thread.join(10)
    journal.close()
    assert capsys.readouterr().err.count("no connection was accepted") == 3


def test_a_frame_that_stops_in_the_middle_ends_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STALL", 0.1)
    with serving(tmp_path) as server, islands.channel(server) as link:
        link.sock.sendall(b"\0" * 9)
        with pytest.raises(Cut, match="the connection ended"):
            link.receive(1 << 16)


def test_kept_answers_are_no_longer_than_planned(tmp_path: Path) -> None:
    here, journal, server = islands.made(tmp_path, share=1.0)
    server.close()
    here.rule.worth = 0.0
    names = ["a", "b", "c"]
    for name in names:
        journal.add(frames.JOIN, name)
    for seq in range(1, 9):
        for name in names:
            pushed(journal, name, seq, 0.01)
            total = sum(len(answer.data) for member in here.members.values() for answer in member.answers)
            assert total <= max(4 * LAYOUT.size, 3 * wire.most(LAYOUT.size))
    assert all(here.members[name].answers[-1].seq == 8 for name in names)  # an island may still have lost this one
    journal.close()


def test_islands_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, most=3) as server:
        numbers = set()
        for number in range(12):
            one = Islander(f"island-{number}", server.port, 9)
            numbers.add(one.join()["number"])
            one.exchange()
            one.link.leave()
        assert len(numbers) == 12  # each has an order of the data of its own
        assert list(server.center.members) == ["island-9", "island-10", "island-11"]
        assert server.last.keys() <= server.center.members.keys() and len(server.center.spent) == 3
        first = server.center.members["island-11"].number
        back = Islander("island-0", server.port, 9)
        back.link.who["has"], back.link.seq = True, 1
        assert back.join()["goes_on"] is False and server.center.members["island-0"].number == first + 1
        model = server.center.rule.model
    with serving(tmp_path, most=3) as server:
        assert torch.equal(server.center.rule.model, model)


# ---- patience and signals


def test_a_frozen_server_holds_an_island_no_longer_than_its_patience(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        one = Islander("a", server.port, 2)
        one.join()
        one.link.config = IslandsConfig(join=one.config.join, patience=0.01)
        data = one.message()
        with server.changed:  # nothing is answered while somebody has this lock
            with pytest.raises(ValueError, match=r"did not answer for 0.01 minutes"):
                one.link.ask(frames.PUSH, data, 1)
            one.link.asked = lambda: True
            with pytest.raises(Halted):
                one.link.ask(frames.PUSH, data, 1)
        one.link.asked = lambda: False
        one.link.config = one.config
        one.take(one.link.ask(frames.PUSH, data, 1))
        one.exchange()
        assert torch.equal(server.center.rule.model, expected({"a": 2}))


def test_a_round_that_lasts_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "BEAT", 0.1)
    with serving(tmp_path, rule="diloco") as server:
        ones = [Islander(name, server.port, 9) for name in ("a", "b")]
        for one in ones:
            one.link.who["rule"] = "diloco"
            one.join()
        ones[0].link.config = IslandsConfig(join=ones[0].config.join, patience=0.05)  # of an answer that takes longer
        waits = threading.Thread(target=ones[0].exchange)
        waits.start()
        waits.join(4)
        assert waits.is_alive()
        ones[1].exchange()
        waits.join(30)
        assert ones[0].seq == 1 and server.center.pushes == 2
