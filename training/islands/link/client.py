"""Ask the server until it answers, through lost connections, lost answers and restarts of the server."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from training.islands.center import Again
from training.islands.config import IslandsConfig, address
from training.islands.link import frames
from training.islands.link.frames import AGAIN, JOIN, NO, OK, POLL, STALL, WAIT, Bucket, Channel, Cut, Halted, Refused
from upcycle.cli.frame import printable
from upcycle.io import strict

T = TypeVar("T")
PAUSE = 0.1, 5.0  # seconds before the second try, and the longest pause
SECONDS = 30.0  # most seconds to connect
LAST = 0.5  # least seconds of a try


def context_of(config: IslandsConfig, *, server: bool) -> ssl.SSLContext | None:
    """Return a TLS context if a certificate or an authority is given; an island shows its certificate only if asked."""
    if not (config.certificate or config.authority):
        return None
    if server and not config.certificate:
        raise ValueError("islands.authority is set without islands.certificate; a server needs its own certificate too")
    if not server and not config.authority:
        raise ValueError("islands.certificate is set without islands.authority; an island must know whom to trust")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if config.certificate:
            context.load_cert_chain(config.certificate)
        if config.authority:
            context.load_verify_locations(config.authority)
    except ssl.SSLError as error:
        where = f"islands.certificate={config.certificate}, islands.authority={config.authority}"
        raise ValueError(f"{where} cannot be used for TLS: {error}; they must be PEM files") from None
    if server and config.authority:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Link:
    def __init__(self, config: IslandsConfig, secret: bytes, who: dict[str, Any], seq: int) -> None:
        """`who`: the island's name, layout and rule, and whether it has taken a model. `seq`: answers it has had."""
        self.config, self.secret, self.who, self.seq = config, secret, {"has": False, **who}, seq
        self.address = address(config.join, "islands.join")
        self.tls = context_of(config, server=False)
        self.bucket = Bucket(config.throttle * 1e9 / 8)
        self.channel: Channel | None = None
        self.most = frames.SENTENCE
        self.asked: Callable[[], bool] = lambda: False  # says whether to stop
        self.left = STALL  # seconds that the server may be silent
        self.before = [0, 0]  # bytes up and down of connections that have ended

    @property
    def bytes_up(self) -> int:
        return self.before[0] + (self.channel.sent if self.channel else 0)

    @property
    def bytes_down(self) -> int:
        return self.before[1] + (self.channel.received if self.channel else 0)

    def introduce(self, most: int, *, empty: bool = False) -> dict[str, Any]:
        """Introduce this island and return the server's welcome. `most`: bytes of the longest message from now on.

        `empty`: join with nothing, and take the whole model."""
        self.most = most
        if empty:
            self.seq, self.who["has"] = 0, False
        told = self.persist(lambda: self.connected(fresh=True))
        if not told["goes_on"] and self.who["has"]:
            self.seq, self.who["has"] = 0, False
            told = self.persist(lambda: self.connected(fresh=True))
        self.who["has"] = True  # the server keeps the model for it until it is taken
        self.seq = told["seq"] if not told["goes_on"] else self.seq
        return told

    def ask(self, kind: int, payload: bytes | bytearray = b"", seq: int = 0) -> bytes:
        """Ask until the server answers, and return the answer. Raise Again if this island must take the whole model."""
        return self.persist(lambda: self.once(kind, payload, seq))

    def once(self, kind: int, payload: bytes | bytearray, seq: int) -> bytes:
        self.connected(fresh=False)
        assert self.channel is not None
        self.channel.send(kind, seq, payload=payload)
        frame = self.channel.receive(self.most)
        while frame.kind == WAIT:  # a round is not over
            frame = self.channel.receive(self.most)
        if frame.kind == AGAIN:
            raise Again(sentence(frame.payload))
        if frame.kind == NO:
            raise Refused(f"the server refused: {sentence(frame.payload)}")
        if frame.kind != OK or frame.seq != seq:
            raise Cut("the server answered another question")
        return frame.payload

    def leave(self) -> None:
        """Tell the server that this island has finished; do nothing if the server cannot be reached."""
        with suppress(ValueError):
            self.persist(lambda: self.once(frames.LEAVE, b"", self.seq), 0.5)
        self.close()

    def persist(self, attempt: Callable[[], T], minutes: float = 0.0) -> T:
        minutes = minutes or self.config.patience
        end, pause = time.monotonic() + minutes * 60, PAUSE[0]
        while True:
            self.left = min(STALL, max(end - time.monotonic(), LAST))
            if self.channel is not None:
                self.channel.idle = self.channel.stall = self.left
            try:
                return attempt()
            except (Cut, OSError) as error:
                self.close()
                if time.monotonic() > end:
                    raise ValueError(
                        f"the server of islands at {self.config.join} did not answer for {minutes:g} minutes "
                        f"({error}); start it, or correct islands.join"
                    ) from None
                self.sleep(min(pause, max(end - time.monotonic(), 0.0)))
                pause = min(2 * pause, PAUSE[1])

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.asked():
                raise Halted
            time.sleep(min(left, POLL))

    def connected(self, fresh: bool) -> dict[str, Any]:
        if self.channel is not None and not fresh:
            return {}
        self.close()
        sock = socket.create_connection(self.address, min(self.left, SECONDS))
        try:
            if self.tls is not None:
                try:
                    sock = self.tls.wrap_socket(sock, server_hostname=self.address[0])
                except ssl.SSLError as error:
                    why = error.reason or error
                    raise Refused(f"TLS with {self.config.join} failed ({why}); check the certificates") from None
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock, self.bucket, self.left, lambda: self.asked())
            channel.meet(self.secret)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel.send(JOIN, self.seq, payload=json.dumps(self.who).encode())
            frame = channel.receive(self.most)
            if frame.kind == NO:
                raise Refused(f"the server refused: {sentence(frame.payload)}")
            told = strict.parse_object(frame.payload, "the server's welcome")
        except BaseException:
            sock.close()
            raise
        self.channel = channel
        if not fresh and told.get("goes_on") is not True:
            raise Again("the server does not remember this island's state")
        return told

    def close(self) -> None:
        if self.channel is not None:
            self.before = [self.bytes_up, self.bytes_down]
            self.channel.sock.close()
            self.channel = None


def sentence(data: bytes) -> str:
    return printable(data.decode(errors="replace"))
