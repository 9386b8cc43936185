"""Authenticate both ends of a socket by a shared secret, and then exchange frames with sums.

    server: MAGIC nonce     island: MAGIC nonce proof     server: proof

    frame: length u64 | kind u8 | seq u32 | number u32 | sum of these | payload | sum of the payload

A sum is 16 bytes of an HMAC-SHA256 with the connection's own key, over the frame and its number in this direction. A
frame that was changed, cut, moved, doubled or kept from another connection is refused. The header's sum is checked
before
its length is used. Frames are not encrypted; TLS can go around them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

VERSION = 2
MAGIC = b"UPISLES" + bytes([VERSION])
SORRY = b"SORRY\0\0\0"  # a refusal instead of the server's proof; a sentence follows
HEADER = struct.Struct("<QBII")
NONCE, PROOF, SUM = 32, 32, 16
SENTENCE = 512  # most bytes of a refusal
LEAST = 16  # least bytes of a secret
BLOCK = 1 << 20
STALL = 120.0  # seconds without a byte in the middle of a frame, after which a connection is given up
POLL = 0.5  # seconds between two questions whether to stop

JOIN, TAKE, PUSH, LEAVE, OK, AGAIN, NO, WAIT = range(1, 9)  # kinds of frames: four from an island, four answers


class Cut(ConnectionError):
    """Say that the other side is gone or that its bytes are wrong; a new connection may help."""


class Halted(Exception):
    """Say that this process was asked to stop while it waited for the other side."""


class Refused(ValueError):
    """Hold the sentence with which the other side refused."""


class Frame(NamedTuple):
    kind: int
    seq: int
    number: int
    payload: bytes


class Bucket:
    """Slow a link down to `rate` bytes a second in both directions together; 0: do not."""

    def __init__(self, rate: float, burst: float = 0.02) -> None:
        self.rate, self.burst = rate, burst  # burst: seconds of traffic that may pass at once
        self.free = time.monotonic()  # when the line is free again

    def take(self, count: int) -> None:
        if not self.rate:
            return
        now = time.monotonic()
        self.free = max(self.free, now - self.burst) + count / self.rate
        time.sleep(max(self.free - now, 0))


class Channel:
    """Be one end of a connection: read and write bytes, shake hands, exchange frames."""

    def __init__(
        self,
        sock: socket.socket,
        bucket: Bucket | None = None,
        idle: float | None = STALL,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`idle`: seconds to wait for a frame; None: for ever. `asked`: says whether to stop waiting."""
        self.sock, self.bucket = sock, bucket or Bucket(0)
        self.idle, self.asked = idle, asked
        self.stall = STALL if idle is None else min(idle, STALL)
        sock.settimeout(POLL)
        self.sent = self.received = 0  # bytes
        self.out_key = self.in_key = b""
        self.out_count = self.in_count = 0

    # ---- bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        step = BLOCK if not self.bucket.rate else max(int(self.bucket.rate * 0.01), 256)
        while view:
            part = view[:step]
            count = self.wait(lambda part=part: self.sock.send(part), self.stall)  # type: ignore[misc]
            self.bucket.take(count)
            self.sent += count
            view = view[count:]

    def read(self, count: int, *, first: bool = False) -> bytes:
        """Read exactly `count` bytes, the `first` of a frame or later ones.

        Memory grows with the bytes that came, not with `count`."""
        data = bytearray()
        step = BLOCK if not self.bucket.rate else max(int(self.bucket.rate * 0.01), 256)
        while (left := count - len(data)) > 0:
            most = min(left, step)
            part = self.wait(
                lambda most=most: self.sock.recv(most),  # type: ignore[misc]
                self.idle if first and not data else self.stall,
            )
            if not part:
                raise Cut("the connection ended")
            self.bucket.take(len(part))
            self.received += len(part)
            data += part
        return bytes(data)

    def wait(self, call: Callable[[], T], seconds: float | None) -> T:
        """Call a function of the socket until some bytes have moved; raise Cut after so many seconds without any."""
        began = time.monotonic()
        while not self.asked():
            try:
                return call()
            except TimeoutError:
                if seconds is not None and time.monotonic() - began > seconds:
                    raise Cut(f"the other side was silent for {seconds:.3g} seconds") from None
            except OSError as error:
                raise Cut(f"the connection ended: {error}") from None
        raise Halted

    # ---- frames

    def send(self, kind: int, seq: int = 0, number: int = 0, payload: bytes | bytearray = b"") -> None:
        header = HEADER.pack(len(payload), kind, seq, number)
        self.write(header + self.total(self.out_key, self.out_count, b"h", header))
        if payload:
            self.write(payload)
        self.write(self.total(self.out_key, self.out_count, b"p", payload))
        self.out_count += 1

    def receive(self, most: int) -> Frame:
        """Return the next frame, with a payload of at most `most` bytes."""
        header = self.read(HEADER.size, first=True)
        if not hmac.compare_digest(self.read(SUM), self.total(self.in_key, self.in_count, b"h", header)):
            raise Cut("a frame's header has a wrong sum")
        length, kind, seq, number = HEADER.unpack(header)
        if length > most:
            raise Cut(f"a frame of {length} bytes came; the longest may have {most}")
        payload = self.read(length)
        if not hmac.compare_digest(self.read(SUM), self.total(self.in_key, self.in_count, b"p", payload)):
            raise Cut("a frame has a wrong sum")
        self.in_count += 1
        return Frame(kind, seq, number, payload)

    @staticmethod
    def total(key: bytes, count: int, part: bytes, data: bytes | bytearray) -> bytes:
        made = hmac.new(key, part + count.to_bytes(8, "little"), "sha256")
        made.update(data)
        return made.digest()[:SUM]

    # ---- the handshake

    def greet(self, secret: bytes) -> None:
        """Do the server's side of the handshake; tell a stranger why in a sentence, and raise it as a ValueError."""
        nonce = os.urandom(NONCE)
        self.write(MAGIC + nonce)
        magic = self.read(len(MAGIC))
        if magic != MAGIC:
            older = magic[:-1] == MAGIC[:-1]
            said = (
                f"this server speaks version {VERSION} of islands, not {magic[-1]}"
                if older
                else "the caller is not an island"
            )
            self.sorry(f"{said}; use the same version of the program on both sides")
        theirs, proof = self.read(NONCE), self.read(PROOF)
        if not hmac.compare_digest(proof, hmac.digest(secret, b"island" + nonce + theirs, "sha256")):
            self.sorry("this island does not have the server's secret; give it the same file in islands.secret")
        self.write(MAGIC + hmac.digest(secret, b"server" + nonce + theirs, "sha256"))
        self.keys(secret, nonce + theirs, server=True)

    def sorry(self, sentence: str) -> None:
        text = sentence.encode()[:SENTENCE]
        self.write(SORRY + len(text).to_bytes(2, "little") + text)
        with contextlib.suppress(OSError):  # closing with unread bytes would destroy the sentence
            self.sock.shutdown(socket.SHUT_WR)
            self.sock.settimeout(1.0)
            for _ in range(16):
                if not self.sock.recv(4096):
                    break
        raise Refused(sentence)

    def meet(self, secret: bytes) -> None:
        """Do the island's side of the handshake."""
        magic = self.read(len(MAGIC))
        if magic[:-1] != MAGIC[:-1]:
            raise Refused("another program than a server of islands listens there; correct islands.join")
        nonce, mine = self.read(NONCE), os.urandom(NONCE)
        self.write(MAGIC + mine + hmac.digest(secret, b"island" + nonce + mine, "sha256"))
        answer = self.read(len(MAGIC))
        if answer == SORRY:
            length = min(int.from_bytes(self.read(2), "little"), SENTENCE)
            raise Refused("the server refused: " + self.read(length).decode(errors="replace"))
        if answer != MAGIC or not hmac.compare_digest(
            self.read(PROOF), hmac.digest(secret, b"server" + nonce + mine, "sha256")
        ):
            raise Refused("the server does not have this island's secret; give it the same file in islands.secret")
        self.keys(secret, nonce + mine, server=False)

    def keys(self, secret: bytes, nonces: bytes, *, server: bool) -> None:
        down, up = (hmac.digest(secret, way + nonces, "sha256") for way in (b"down", b"up"))
        self.out_key, self.in_key = (down, up) if server else (up, down)


def secret_of(file: str) -> bytes:
    """Read the secret from a file, without the space around it."""
    if not file:
        raise ValueError(
            "islands.secret is not set; write a file with at least 16 random bytes (openssl rand -hex 32 > FILE), copy "
            "it to every island, and set islands.secret to its name"
        )
    if Path(file).stat().st_mode & 0o077:
        warnings.warn(
            f"other users of this machine may read or change islands.secret={file}; chmod 600 {file}", stacklevel=2
        )
    secret = Path(file).read_bytes()[: 1 << 16].strip()
    if len(secret) < LEAST:
        raise ValueError(f"islands.secret={file} holds {len(secret)} bytes; it must hold at least {LEAST}")
    return secret
