"""Serve a center over sockets: one thread for each connection, one lock, and bounded memory for strangers."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.islands.center import HEAD, NAME, Again, Center, Member, Poison
from training.islands.config import IslandsConfig, address
from training.islands.journal import Journal
from training.islands.link import frames
from training.islands.link.client import context_of
from training.islands.link.frames import (
    AGAIN,
    JOIN,
    LEAVE,
    NO,
    OK,
    PUSH,
    STALL,
    TAKE,
    WAIT,
    Channel,
    Cut,
    Frame,
    Halted,
)
from upcycle.cli.frame import printable
from upcycle.io import strict

BLOCK = 4 << 20  # bytes of the model in one answer
STRANGERS = 32  # most connections that have not shown the secret yet
SECONDS = 10.0  # seconds for a stranger to show the secret
PAUSE = 0.1  # seconds after an error of `accept`
BEAT = 20.0  # seconds after which an island that waits for a round hears that the server still works
LETTERS = re.compile(r"[A-Za-z0-9._-]{1,%d}" % NAME, re.ASCII)  # noqa: UP031


@dataclass
class Stranger:
    """Hold a connection that has not introduced itself."""

    sock: socket.socket
    host: str
    until: float  # when it is closed


class Server:
    def __init__(
        self,
        center: Center,
        journal: Journal,
        config: IslandsConfig,
        secret: bytes,
        agreed: Mapping[str, Any] | None = None,
    ) -> None:
        """`agreed`: settings, by key, that every island must have."""
        self.center, self.journal, self.config, self.secret = center, journal, config, secret
        self.agreed = agreed or {}
        self.changed = threading.Condition()  # guards center and journal
        self.strangers: dict[int, Stranger] = {}  # by number, the oldest first
        self.beat = min(BEAT, config.patience * 15)
        self.connections: dict[str, Channel] = {}
        self.last: dict[str, float] = {}  # when an island was last heard
        self.ending = False
        self.failed: BaseException | None = None  # an error of the disk, which ends the server
        self.tls = context_of(config, server=True)
        host, port = address(config.listen, "islands.listen")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"islands.listen={config.listen} cannot be used ({why}); choose another port") from None

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def run(self, stop: Callable[[], bool], stays: bool = False) -> None:
        """Serve until `stop` says so, or all islands have left, unless it `stays` for those that come back."""
        accepting = threading.Thread(target=self.accept, daemon=True)
        accepting.start()
        try:
            done = False
            while not (stop() or self.ending or done or self.failed):
                with self.changed:
                    self.changed.wait(0.2)
                    with contextlib.suppress(Cut):  # an error of the disk is in `failed`
                        self.expel()
                    done = self.center.done and not stays
                for number, stranger in list(self.strangers.items()):
                    if time.monotonic() > stranger.until:
                        self.shed(number)
            with self.changed:  # the last island still waits for the answer to its leave
                self.changed.wait_for(lambda: not self.connections, 5.0 if done else 0.0)
        finally:
            self.close()
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        with self.changed:
            self.ending = True
            shut(self.listener)  # closing alone does not wake `accept`
            self.listener.close()
            for number in list(self.strangers):
                self.shed(number)
            for channel in list(self.connections.values()):
                self.drop(channel)
            self.changed.notify_all()

    def expel(self) -> None:
        """Let islands leave that hold up a round and have been silent for too long. They may come back."""
        now = time.monotonic()
        waiting = any(member.waits for member in self.center.members.values())
        for name, member in list(self.center.members.items()):
            if not waiting:
                return
            heard = self.last.setdefault(name, now)
            if member.here and not member.waits and now - heard > self.config.patience * 60:
                print(f"island {name} was silent for {self.config.patience:g} minutes; the others continue", flush=True)
                self.event(LEAVE, name)

    def accept(self) -> None:
        for number in itertools.count():
            try:
                sock, peer = self.listener.accept()
            except OSError as error:
                if self.ending:
                    return
                print(f"no connection was accepted ({error}); trying again", file=sys.stderr, flush=True)
                self.make_room(0)  # no handle may be left
                time.sleep(PAUSE)
                continue
            self.make_room(STRANGERS - 1)
            # a deadline and not only a timeout of each read: a stranger could send a byte from time to time
            self.strangers[number] = Stranger(sock, str(peer[0]), time.monotonic() + SECONDS)
            try:
                threading.Thread(target=self.talk, args=(number,), daemon=True).start()
            except RuntimeError:  # no thread is left
                self.shed(number)
                sock.close()

    def make_room(self, most: int) -> None:
        """Close the oldest strangers of the address that has the most of them, until at most `most` are left."""
        while len(strangers := list(self.strangers.items())) > most:
            hosts = Counter(stranger.host for _, stranger in strangers)
            self.shed(max(strangers, key=lambda item: (hosts[item[1].host], -item[0]))[0])

    def shed(self, number: int) -> None:
        stranger = self.strangers.pop(number, None)
        if stranger is not None:
            shut(stranger.sock)

    def talk(self, number: int) -> None:
        """Serve one connection from its first byte to its last."""
        stranger, name = self.strangers.get(number), ""
        if stranger is None:
            return
        sock = stranger.sock
        try:
            if self.tls is not None:
                sock.settimeout(SECONDS)
                sock = stranger.sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                sock.do_handshake()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock, idle=SECONDS, asked=lambda: self.ending)
            channel.greet(self.secret)
            frame = channel.receive(HEAD)
            if self.strangers.pop(number, None) is None:
                return
            channel.idle, channel.stall = None, STALL
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            name = self.introduced(channel, frame)
            while not self.ending:
                self.answer(channel, name, channel.receive(self.center.longest()))
        except (Cut, Halted, OSError):
            pass
        except ValueError as error:
            print(f"a connection ended: {printable(str(error))}", file=sys.stderr, flush=True)
        finally:
            self.strangers.pop(number, None)
            with self.changed:
                if name and self.connections.get(name) is not None and self.connections[name].sock is sock:
                    del self.connections[name]
                    self.changed.notify_all()
            sock.close()

    def introduced(self, channel: Channel, frame: Frame) -> str:
        """Answer the first frame, in which an island introduces itself; return its name."""
        try:
            if frame.kind != JOIN:
                raise ValueError(f"a connection begins with a frame of kind {frame.kind}; it must begin with {JOIN}")
            asked = strict.parse_object(frame.payload, "an island's introduction")
            name = asked.get("name")
            if not isinstance(name, str) or not LETTERS.fullmatch(name):
                raise ValueError(
                    f"an island's name is {strict.short(name)}; it must be at most {NAME} letters, digits, or . _ -"
                )
            for key, want in (("layout", self.center.layout.digest), ("rule", self.config.rule)):
                if asked.get(key) != want:
                    raise ValueError(
                        f"island {name} has another {'model' if key == 'layout' else 'islands.rule'} than the server; "
                        "start both with the same config"
                    )
            theirs = strict.held(asked.get("agreed", {}), dict[str, Any], "an island's settings")
            for key, value in self.agreed.items():
                if theirs.get(key) != value:
                    raise ValueError(
                        f"island {name} has {key}={strict.short(theirs.get(key))}, and the server has "
                        f"{strict.short(value)}; start both with the same config"
                    )
            with self.changed:
                has = asked.get("has") is True
                self.center.check_good(name)
                goes_on = has and self.center.knows(name, frame.seq)
                if has and not goes_on:  # the server forgot its state; it may join again with nothing
                    channel.send(OK, payload=b'{"goes_on": false}')
                    raise Cut(f"island {name} cannot continue from its state")
                if not goes_on:
                    self.event(JOIN, name)
                member = self.center.members[name]
                before = self.connections.get(name)
                if before is not None:  # the old process has died, or two islands have one name
                    self.drop(before)
                self.connections[name] = channel
                told: dict[str, object] = {
                    "goes_on": goes_on, "number": member.number, "seq": member.seq, "islands": self.center.here,
                    "decay": self.center.decay, "steps": self.center.steps,
                }  # fmt: skip
                if not goes_on:
                    told["model"] = self.digest(member)
                    if self.center.bias is not None:
                        told["bias"] = self.center.bias.tolist()
        except ValueError as error:
            channel.send(NO, payload=str(error).encode()[: frames.SENTENCE])
            raise
        channel.send(OK, payload=json.dumps(told).encode())
        return name

    def digest(self, member: Member) -> str:
        return hashlib.sha256(memoryview(self.center.rule.has[member.number].numpy())).hexdigest()

    def answer(self, channel: Channel, name: str, frame: Frame) -> None:
        """Answer a frame; while a round is not over, say again and again that the server still works."""
        data: bytes | bytearray | None = None
        kind = OK
        while data is None:
            try:
                with self.changed:
                    if self.connections.get(name) is not channel or name not in self.center.members:
                        raise Cut("another connection has this name")
                    number = self.center.members[name].number
                    data = self.told(channel, name, frame)
            except Again as error:
                kind, data = AGAIN, str(error).encode()[: frames.SENTENCE]
            except ValueError as error:
                kind, data = NO, str(error).encode()[: frames.SENTENCE]
            channel.send(WAIT if data is None else kind, frame.seq, number, data or b"")

    def told(self, channel: Channel, name: str, frame: Frame) -> bytes | bytearray | None:
        """Return the answer to a frame, or None if it needs more time."""
        member = self.center.members[name]
        self.last[name] = time.monotonic()
        if frame.kind == TAKE:
            return self.part(member, frame.payload)
        if frame.kind == PUSH:
            return self.push(channel, name, frame)
        if frame.kind != LEAVE:
            raise ValueError(f"a frame of kind {frame.kind} came; use the same version on both sides")
        if member.here and member.seq == frame.seq:
            self.event(LEAVE, name)
        return b""

    def push(self, channel: Channel, name: str, frame: Frame) -> bytes | bytearray | None:
        member, until = self.center.members[name], time.monotonic() + self.beat
        data = self.center.answer(name, frame.seq, frame.payload)
        if data is None and member.seq < frame.seq:
            try:
                self.event(PUSH, name, frame.seq, frame.payload)
            except Poison as error:
                why = str(error)
                self.write(lambda: self.journal.quarantine(name, why))
                print(f"island {name} is in quarantine, because {why}; its last pushes are taken back", flush=True)
                raise ValueError(f"island {name} is in quarantine, because {why}") from None
            data = self.center.answer(name, frame.seq, frame.payload)
        while data is None and time.monotonic() < until:  # a round is not over
            self.changed.wait(0.5)
            if self.ending or self.connections.get(name) is not channel:
                raise Cut("the server ends, or another connection has this name")
            if not member.waits:
                data = self.center.answer(name, frame.seq, frame.payload)
        self.last[name] = time.monotonic()
        return data

    def part(self, member: Member, payload: bytes) -> bytes:
        """Return BLOCK bytes of an island's copy of the model, from the place that the payload names."""
        if len(payload) != 8 or not member.here:
            raise Again("the server has no copy of the model for this island")
        at = int.from_bytes(payload, "little")
        return memoryview(self.center.rule.has[member.number].numpy()).cast("B")[at : at + BLOCK].tobytes()

    def event(self, kind: int, name: str, seq: int = 0, data: bytes = b"") -> None:
        self.write(lambda: self.journal.add(kind, name, seq, data))
        self.last[name] = time.monotonic()

    def write(self, change: Callable[[], None]) -> None:
        """Change the journal; an error of the disk ends the server."""
        try:
            change()
        except OSError as error:
            self.failed = error
            raise Cut("the server cannot write") from error
        self.last = {name: heard for name, heard in self.last.items() if name in self.center.members}
        self.changed.notify_all()

    def drop(self, channel: Channel) -> None:
        shut(channel.sock)


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
