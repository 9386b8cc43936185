"""Serve a center over sockets: one thread for each connection, one lock, and bounded memory for strangers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from training.islands.center import HEAD, NAME, Again, Center, Member, Poison
from training.islands.config import IslandsConfig, address
from training.islands.journal import Journal
from training.islands.link import frames
from training.islands.link.client import context_of
from training.islands.link.frames import AGAIN, JOIN, LEAVE, NO, OK, PUSH, TAKE, Channel, Cut, Frame
from upcycle.cli.frame import printable
from upcycle.io import strict

BLOCK = 4 << 20  # bytes of the model in one answer
STRANGERS = 32  # most connections that have not shown the secret yet
SECONDS = 10.0  # seconds for a stranger to show the secret
STALL = 120.0  # seconds without a byte in the middle of a frame
LETTERS = re.compile(r"[A-Za-z0-9._-]{1,%d}" % NAME, re.ASCII)  # noqa: UP031


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
        self.strangers = threading.BoundedSemaphore(STRANGERS)
        self.deadlines: dict[socket.socket, float] = {}  # when a stranger's connection is closed
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

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop` says so, or all islands have left."""
        accepting = threading.Thread(target=self.accept, daemon=True)
        accepting.start()
        try:
            done = False
            while not (stop() or self.ending or done or self.failed):
                with self.changed:
                    self.changed.wait(0.2)
                    with contextlib.suppress(Cut):  # an error of the disk is in `failed`
                        self.expel()
                    done = self.center.done
                for sock, until in list(self.deadlines.items()):
                    if time.monotonic() > until:
                        shut(sock)
            with self.changed:  # the last island still waits for the answer to its leave
                self.changed.wait_for(lambda: not self.connections, 5.0 if done else 0.0)
        finally:
            self.close()
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        with self.changed:
            self.ending = True
            self.listener.close()
            for channel in list(self.connections.values()):
                self.drop(channel)
            self.changed.notify_all()

    def expel(self) -> None:
        """Let islands leave that hold up a round and have been silent for too long. They may come back."""
        now = time.monotonic()
        waiting = any(member.waits for member in self.center.members.values())
        for name, member in self.center.members.items():
            if not waiting:
                return
            heard = self.last.setdefault(name, now)
            if member.here and not member.waits and now - heard > self.config.patience * 60:
                print(f"island {name} was silent for {self.config.patience:g} minutes; the others continue", flush=True)
                self.event(LEAVE, name)

    def accept(self) -> None:
        while not self.ending:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            if not self.strangers.acquire(blocking=False):
                sock.close()  # so many strangers at once are a flood
                continue
            threading.Thread(target=self.talk, args=(sock,), daemon=True).start()

    def talk(self, sock: socket.socket) -> None:
        """Serve one connection from its first byte to its last."""
        plain, name = sock, ""
        try:
            # a deadline (in `run`) and not only a timeout of each read: a stranger could send a byte from time to time
            self.deadlines[plain] = time.monotonic() + SECONDS
            try:
                sock.settimeout(SECONDS)
                if self.tls is not None:
                    sock = self.tls.wrap_socket(sock, server_side=True)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = Channel(sock)
                channel.greet(self.secret)
            finally:
                del self.deadlines[plain]
                self.strangers.release()
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            name = self.introduced(channel)
            while not self.ending:
                self.answer(channel, name, channel.receive(self.center.longest()))
        except (Cut, OSError, ssl.SSLError):
            pass
        except ValueError as error:
            print(f"a connection ended: {printable(str(error))}", file=sys.stderr, flush=True)
        finally:
            with self.changed:
                if name and self.connections.get(name) is not None and self.connections[name].sock is sock:
                    del self.connections[name]
                    self.changed.notify_all()
            sock.close()

    def introduced(self, channel: Channel) -> str:
        """Answer the first frame, in which an island introduces itself; return its name."""
        frame = channel.receive(HEAD)
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
        data: bytes | bytearray = b""
        kind = OK
        try:
            with self.changed:
                if self.connections.get(name) is not channel:
                    raise Cut("another connection has this name")
                self.last[name] = time.monotonic()
                member = self.center.members[name]
                if frame.kind == TAKE:
                    data = self.part(member, frame.payload)
                elif frame.kind == PUSH:
                    data = self.push(channel, name, frame)
                elif frame.kind == LEAVE:
                    if member.here and member.seq == frame.seq:
                        self.event(LEAVE, name)
                else:
                    raise ValueError(f"a frame of kind {frame.kind} came; use the same version on both sides")
                self.last[name] = time.monotonic()
        except Again as error:
            kind, data = AGAIN, str(error).encode()[: frames.SENTENCE]
        except ValueError as error:
            kind, data = NO, str(error).encode()[: frames.SENTENCE]
        channel.send(kind, frame.seq, member.number, data)

    def push(self, channel: Channel, name: str, frame: Frame) -> bytes | bytearray:
        member = self.center.members[name]
        data = self.center.answer(name, frame.seq, frame.payload)
        if data is None and member.seq < frame.seq:
            try:
                self.event(PUSH, name, frame.seq, frame.payload)
            except Poison as error:
                why = str(error)
                self.write(lambda: self.journal.quarantine(name, why))
                self.changed.notify_all()
                print(f"island {name} is in quarantine, because {why}; its last pushes are taken back", flush=True)
                raise ValueError(f"island {name} is in quarantine, because {why}") from None
        while data is None:  # a round is not over
            data = self.center.answer(name, frame.seq, frame.payload)
            if data is None:
                self.changed.wait(0.5)
            if self.ending or self.connections.get(name) is not channel:
                raise Cut("the server ends, or another connection has this name")
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
        self.changed.notify_all()

    def drop(self, channel: Channel) -> None:
        shut(channel.sock)


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
