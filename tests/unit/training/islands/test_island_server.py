"""A server and its islands over loopback: nothing is lost, nothing counts twice, and strangers get a sentence."""

from __future__ import annotations

import errno
import random
import resource
import signal
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import islands
from tests.islands import LAYOUT, SECRET, Islander, expected, serving
from training.islands import journal as journal_module
from training.islands.center import Again
from training.islands.config import IslandsConfig
from training.islands.link import frames
from training.islands.link import server as serve
from training.islands.link.client import Link
from training.islands.link.frames import Bucket, Channel, Cut, Refused, secret_of
from training.islands.link.server import STRANGERS, Server


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A minute for each test: a server that never answers is a failure, not a suite that stands still."""

    def late(*_: object) -> None:
        raise AssertionError("nothing was answered for a minute")  # an OSError would be tried again

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def island(server: Server, name: str, pushes: int = 99, folder: Path | None = None) -> Islander:
    found = Islander(name, server.port, pushes, folder)
    found.join()
    return found


def has(server: Server, one: Islander) -> torch.Tensor:
    found: torch.Tensor = server.center.rule.has[server.center.members[one.name].number]
    return found


def test_every_push_counts_once_and_islands_have_what_the_server_says(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a, b = island(server, "a", 5), island(server, "b", 3)
        for one in (a, b, a, a, b, a, b, a):
            one.exchange()
            assert torch.equal(one.has, has(server, one))
        late = island(server, "late")
        assert torch.equal(late.has, server.center.rule.model)
        assert torch.equal(server.center.rule.model, expected({"a": 5, "b": 3}))
        assert [server.center.members[name].number for name in ("a", "b", "late")] == [0, 1, 2]


def test_a_lost_answer_is_given_again_and_the_push_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as server:
        a = island(server, "a")
        real, lost = Channel.receive, [0]

        def receive(channel: Channel, most: int) -> frames.Frame:
            frame = real(channel, most)
            if frame.seq == 1 and frame.kind == frames.OK and lost[0] < 2:
                lost[0] += 1
                raise Cut("the answer is lost")
            return frame

        monkeypatch.setattr(Channel, "receive", receive)
        a.exchange()
        assert lost == [2] and server.center.pushes == 1
        assert torch.equal(a.has, has(server, a))


def test_a_server_that_stays_answers_an_island_that_left_and_lost_its_last_answer(tmp_path: Path) -> None:
    _, journal, server = islands.made(tmp_path, count=1)
    over = threading.Event()
    thread = threading.Thread(target=server.run, args=(over.is_set, True), daemon=True)
    thread.start()
    a = Islander("a", server.port, 2, tmp_path)
    a.join()
    a.exchange()
    a.keep()
    a.exchange()
    a.link.leave()
    assert server.center.done
    again = Islander("a", server.port, 2, tmp_path)  # killed before it kept its last exchange
    assert again.seq == 1 and again.join()["goes_on"]
    again.exchange()
    assert torch.equal(again.has, server.center.rule.model) and server.center.pushes == 2
    again.link.leave()
    over.set()
    thread.join(10)
    assert not thread.is_alive()
    journal.close()


def test_a_push_that_comes_twice_is_told_the_same_and_one_too_early_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a = island(server, "a")
        data = a.message()
        first = a.link.ask(frames.PUSH, data, 1)
        assert a.link.ask(frames.PUSH, data, 1) == first and server.center.pushes == 1
        with pytest.raises(Refused, match="push 3 of island a came instead of push 2"):
            a.link.ask(frames.PUSH, data, 3)
        with pytest.raises(Again, match="differs from the first one"):
            a.link.ask(frames.PUSH, data[:-1] + b"\x3f", 1)


def test_a_server_that_is_killed_begins_again_bit_for_bit(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a, b = island(server, "a", 9), island(server, "b")
        for one in (a, b, a):
            one.exchange()
        server.journal.save()
        a.exchange()
        b.exchange()
        before = server.center.state()
        log = server.journal.log(server.journal.number)
    whole = log.read_bytes()
    log.write_bytes(
        whole + whole[71 : 71 + len(whole) // 3]
    )  # behind the snapshot's sum: an event that was being written
    with serving(tmp_path) as server:
        after = server.center.state()
        assert after[1] == before[1] and after[0].keys() == before[0].keys()
        assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
        assert log.read_bytes() == whole
        a.link.address = b.link.address = ("127.0.0.1", server.port)
        for one in (a, b):
            one.exchange()
            assert torch.equal(one.has, has(server, one))


@pytest.mark.parametrize("at", [0.1, 0.5, 0.97])
def test_a_log_that_is_cut_anywhere_loses_only_what_nobody_was_told(tmp_path: Path, at: float) -> None:
    with serving(tmp_path) as server:
        a = island(server, "a")
        for _ in range(4):
            a.exchange()
        log = server.journal.log(0)
    log.write_bytes(log.read_bytes()[: int(at * log.stat().st_size)])
    with serving(tmp_path) as server:
        member = server.center.members.get("a")
        count = 0 if member is None else member.seq
        assert count == server.center.pushes < 4


def test_what_is_not_on_the_disk_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, journal, server = islands.made(tmp_path)
    server.close()
    journal.add(frames.JOIN, "a")
    one = Islander("a", 1, 9)
    data, before, size = one.message(), here.rule.model.clone(), journal.log(0).stat().st_size

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync", full)
        with pytest.raises(OSError, match="No space"):
            journal.add(frames.PUSH, "a", 1, data)
    assert here.pushes == 0 and torch.equal(here.rule.model, before)
    journal.add(frames.PUSH, "a", 1, data)
    journal.close()
    assert here.pushes == 1 and journal.log(0).stat().st_size > size + len(data)
    again, journal, server = islands.made(tmp_path)
    server.close()
    journal.close()
    assert again.pushes == 1 and torch.equal(again.rule.model, here.rule.model)


def test_a_push_that_the_disk_refuses_halfway_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    """The system refuses the rest of a record; what it took must not stand before the next record, nor come later."""
    here, journal, server = islands.made(tmp_path)
    server.close()
    journal.add(frames.JOIN, "a")
    log, data = journal.log(0), Islander("a", 1, 9).message()
    size = log.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            journal.add(frames.PUSH, "a", 1, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(log) and log.stat().st_size == size
    journal.add(frames.PUSH, "a", 1, data)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot be written \(.*File too large.*snapshot-1"):
            journal.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.close()
    again, journal, server = islands.made(tmp_path)
    server.close()
    journal.close()
    assert again.pushes == here.pushes == 1 and torch.equal(again.rule.model, here.rule.model)


def test_an_island_that_has_left_takes_the_model_before_it_learns(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        a, b = island(server, "a", 9, tmp_path), island(server, "b")
        a.exchange()
        a.keep()
        a.link.leave()
        b.exchange()
        again = Islander("a", server.port, 9, tmp_path)
        assert again.join()["goes_on"] is False
        assert torch.equal(again.has, server.center.rule.model)


def test_an_island_that_goes_back_learns_the_same_again_and_nothing_counts_twice(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        a, b = island(server, "a", 6, tmp_path), island(server, "b", 2)
        for one in (a, b, a):
            one.exchange()
        a.keep()  # its checkpoint
        a.exchange()
        a.exchange()
        b.exchange()
        again = Islander("a", server.port, 6, tmp_path)  # killed, and started from there
        assert again.seq == 2 and again.join()["goes_on"]
        again.exchange()
        again.exchange()
        assert server.center.pushes == 6
        assert torch.equal(again.has, a.has) and torch.equal(again.unsent, a.unsent)
        again.exchange()
        again.exchange()
        assert torch.equal(server.center.rule.model, expected({"a": 6, "b": 2}))


def test_an_island_that_learns_another_thing_takes_the_whole_model(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        a = island(server, "a", 99, tmp_path)
        a.exchange()
        a.keep()
        a.exchange()
        again = Islander("a", server.port, 99, tmp_path)
        again.join()
        again.unsent += 1.0  # as on a GPU whose sums come in another order
        with pytest.raises(Again, match="differs from the first one"):
            again.exchange()
        again.link.introduce(1 << 20, empty=True)
        assert server.center.members["a"].seq == 2


def test_a_server_without_its_folder_refuses_islands_that_remember(tmp_path: Path) -> None:
    with serving(tmp_path / "one") as server:
        a = island(server, "a")
        a.exchange()
    with serving(tmp_path / "two") as server:
        island(server, "a")
        a.link.address = ("127.0.0.1", server.port)
        with pytest.raises(Refused, match="has had 1 answers, and this server remembers 0"):
            a.exchange()


def test_a_late_island_takes_the_model_through_a_cut_while_others_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (islands, serve):
        monkeypatch.setattr(module, "BLOCK", 4096)
    with serving(tmp_path) as server:
        a = island(server, "a")
        a.exchange()
        real, blocks = Channel.receive, [0]

        def receive(channel: Channel, most: int) -> frames.Frame:
            frame = real(channel, most)
            if frame.kind == frames.OK and len(frame.payload) == 4096:
                blocks[0] += 1
                if blocks[0] == 2:
                    a.exchange()
                    raise Cut("the line is cut")
            return frame

        monkeypatch.setattr(Channel, "receive", receive)
        late = island(server, "late")
        assert blocks[0] > 4
        assert torch.equal(late.has, has(server, late)) and not torch.equal(late.has, server.center.rule.model)
        late.exchange()
        assert torch.equal(late.has, server.center.rule.model)


def test_islands_that_leave_are_not_awaited_and_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as server:
        for name in ("a", "b"):
            one = island(server, name, 2)
            one.exchange()
            one.exchange()
            assert not server.center.done
            one.link.leave()
        assert server.center.done and not server.center.rule.has


def test_diloco_answers_all_when_all_have_pushed(tmp_path: Path) -> None:
    with serving(tmp_path, rule="diloco") as server:
        port = server.port
        found: dict[str, Any] = {}

        def one(name: str) -> None:
            a = Islander(name, port, 2)
            a.link.who["rule"] = "diloco"
            a.join()
            found[name] = a
            ready.wait()
            a.exchange()

        ready = threading.Barrier(3)
        threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        ready.wait(30)
        for thread in threads:
            thread.join(30)
        assert server.center.pushes == 2
        assert torch.equal(found["a"].has, found["b"].has)
        assert torch.equal(found["a"].has, has(server, found["a"]))


# ---- strangers


def greeted(server: Server, data: bytes) -> bytes:
    """All that a server says to a connection that sends some bytes."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.settimeout(10)
        said = b""
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(4096):
                said += part
        except ConnectionError:
            pass
        return said


def test_strangers_get_one_sentence_and_change_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a = island(server, "a")
        assert b"the caller is not an island" in greeted(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        older = frames.MAGIC[:-1] + b"\x63"
        assert b"this server speaks version 2 of islands, not 99" in greeted(server, older + bytes(64))
        assert b"does not have the server's secret" in greeted(server, frames.MAGIC + bytes(64))
        draw = random.Random(0)
        for _ in range(20):
            greeted(server, draw.randbytes(draw.randrange(5000)))
        greeted(server, b"\xff" * (8 << 20))  # a flood, of which nothing is kept
        a.exchange()
        assert list(server.center.members) == ["a"]


def test_the_secret_the_model_the_rule_and_the_name_are_checked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        config = IslandsConfig(join=f"127.0.0.1:{server.port}", patience=0.05)
        good = {"name": "a", "layout": LAYOUT.digest, "rule": "dgs"}
        for secret, changed, said in [
            (SECRET[:-1] + b"x", {}, "does not have the server's secret; give it the same file"),
            (SECRET, {"layout": "other"}, "has another model than the server"),
            (SECRET, {"rule": "dense"}, "has another islands.rule than the server"),
            (SECRET, {"name": "../a"}, "an island's name is '../a'; it must be at most 64 letters"),
        ]:
            with pytest.raises(Refused, match=said):
                Link(config, secret, good | changed, 0).introduce(1 << 16)
        assert not server.center.members


def test_what_listens_there_may_be_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(
            target=lambda: other.accept()[0].sendall(b"220 mail ready, go on\r\n" * 9), daemon=True
        ).start()
        config = IslandsConfig(join=f"127.0.0.1:{other.getsockname()[1]}", patience=0.05)
        with pytest.raises(
            Refused, match=r"another program than a server of islands listens there; correct islands.join"
        ):
            Link(config, SECRET, {}, 0).introduce(1 << 16)
        port = other.getsockname()[1]
    with pytest.raises(ValueError, match=r"did not answer for 0.01 minutes"):
        Link(IslandsConfig(join=f"127.0.0.1:{port}", patience=0.01), SECRET, {}, 0).introduce(1 << 16)


def test_more_silent_strangers_than_fit_do_not_stop_those_who_are_in(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a, before = island(server, "a"), threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * STRANGERS)]
        time.sleep(0.3)
        a.exchange()
        assert threading.active_count() <= before + STRANGERS
        for sock in silent:
            sock.close()


def test_an_announced_length_is_not_believed(tmp_path: Path) -> None:
    """With the secret even: a frame longer than any can be ends the connection before a byte of it is kept."""
    with serving(tmp_path) as server, islands.channel(server) as link:
        header = frames.HEADER.pack(1 << 40, frames.PUSH, 1, 0)
        link.write(header + link.total(link.out_key, link.out_count, b"h", header))
        with pytest.raises(Cut) as found:
            link.receive(1 << 16)
        assert "silent" not in str(found.value)  # the server has ended it, and does not wait for the bytes


def test_changed_frames_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slice of `python -m tests.islands --frames 10000`."""
    with serving(tmp_path) as server:
        found = islands.mutants(server, 120, seed=1)
    assert found["cut"] > 40 and found["refused"] > 30, found


def test_a_frame_that_comes_twice_or_in_another_order_is_none(tmp_path: Path) -> None:
    with serving(tmp_path) as server, islands.channel(server) as link:
        kept: list[bytes] = []
        real = link.write
        link.write = kept.append  # type: ignore[method-assign,assignment]
        link.send(frames.TAKE, payload=bytes(8))
        link.write = real  # type: ignore[method-assign]
        link.write(b"".join(kept))
        assert link.receive(1 << 23).kind == frames.OK
        link.write(b"".join(kept))
        with pytest.raises(Cut):
            link.receive(1 << 23)


def test_tls_with_certificates_goes_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SECONDS", 0.5)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    try:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key",
                "-out", "cert", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl that makes a certificate")
    (tmp_path / "both").write_text((tmp_path / "key").read_text() + (tmp_path / "cert").read_text())
    with serving(tmp_path / "server", certificate=str(tmp_path / "both")) as server:
        who = {"name": "a", "layout": LAYOUT.digest, "rule": "dgs"}
        join = f"127.0.0.1:{server.port}"
        told = Link(IslandsConfig(join=join, authority=str(tmp_path / "cert"), patience=0.1), SECRET, who, 0)
        assert told.introduce(1 << 16)["number"] == 0
        assert isinstance(told.channel, Channel) and isinstance(told.channel.sock, ssl.SSLSocket)
        told.close()
        with pytest.raises(ValueError, match=r"another program than a server|did not answer"):
            Link(IslandsConfig(join=join, patience=0.01), SECRET, who, 0).introduce(1 << 16)


# ---- the link


def test_a_throttled_link_is_as_slow_as_it_says_and_every_byte_is_counted(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        a = island(server, "a")
        before = a.link.bytes_up + a.link.bytes_down
        a.link.bucket = Bucket(20_000)
        assert a.link.channel is not None
        a.link.channel.bucket = a.link.bucket
        began = time.monotonic()
        for _ in range(4):
            a.exchange()
        moved, took = a.link.bytes_up + a.link.bytes_down - before, time.monotonic() - began
        assert moved > 4000 and took > 0.7 * moved / 20_000


def test_a_secret_is_a_file_with_enough_in_it(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(ValueError, match="holds 6 bytes; it must hold at least 16"):
        secret_of(str(tmp_path / "short"))
    with pytest.raises(ValueError, match=r"islands.secret is not set; write a file"):
        secret_of("")
    good = tmp_path / "good"
    good.write_bytes(SECRET + b"\n")
    good.chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert secret_of(str(good)) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o620])
def test_a_secret_that_others_may_read_or_change_is_named(tmp_path: Path, mode: int) -> None:
    good = tmp_path / "good"
    good.write_bytes(SECRET)
    good.chmod(mode)
    with pytest.warns(UserWarning, match=f"other users of this machine .*{good}; chmod 600"):
        assert secret_of(str(good)) == SECRET
