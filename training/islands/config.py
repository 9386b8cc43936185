"""The keys of islands."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class IslandsConfig:
    join: str = ""  # HOST:PORT of a server (islands.serve=true) that this run is an island of
    serve: bool = False  # be the server that islands join, in place of training
    local: int = 0  # a try on this machine: a server and so many islands, as processes; 0: none
    name: str = ""  # of this island, by which the server knows it again; "": the name of its output folder
    rule: str = "dgs"  # how islands learn from each other, a file of training/islands/rules: dgs | diloco | dense
    every: int = 20  # steps of an island between its exchanges
    share: float = 0.02  # of each matrix's numbers that an exchange sends; dense and diloco send all
    answer: float = 0.0  # share that the server answers with; 0: all that an island has not got
    momentum: float = 0.0  # dgs: SAMomentum's, which sends 1 - momentum of what has gathered; 0: plain error feedback
    keep: bool = True  # dgs: an island goes on with what it has learned and not sent; false: as published, without it
    gain: float = 0.0  # what a delta is multiplied with; 0: as the rule says (dgs: 1 / islands)
    age: int = 50  # exchanges after which an expert with few tokens sends all it has; 0: never
    listen: str = "0.0.0.0:29600"  # serve: HOST:PORT
    count: int = 0  # serve: ends, with an export, when so many islands have come and all have left; 0: goes on
    most: int = 32  # serve: islands at once, which bounds its memory: the model in float32 for each
    secret: str = ""  # file with the secret that server and islands share, at least 16 bytes
    certificate: str = ""  # TLS: file with the server's (serve) or this island's certificate and key, PEM
    authority: str = ""  # TLS: file with the certificate that the other side's must be signed by, PEM
    throttle: float = 0.0  # Gb/s that this island's link is slowed down to, for trials; 0: as fast as it is
    patience: float = 10.0  # minutes that an island tries to reach a server, and that a round waits for an island

    def __post_init__(self) -> None:
        if self.join and self.local:
            raise ValueError(
                f"islands.join={self.join} and islands.local={self.local} are both set; join a server, or start one"
            )
        for name, least in (("local", 0), ("every", 1), ("age", 0), ("count", 0), ("most", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"islands.{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.share <= 1:
            raise ValueError(f"islands.share is {self.share}; it must be a share above 0, up to 1")
        if not 0 <= self.answer <= 1:
            raise ValueError(f"islands.answer is {self.answer}; it must be a share, 0 for all that there is")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"islands.momentum is {self.momentum}; it must be at least 0 and below 1")
        for name in ("gain", "throttle"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"islands.{name} is {getattr(self, name)}; it must be a number of at least 0")
        if not (math.isfinite(self.patience) and self.patience > 0):
            raise ValueError(f"islands.patience is {self.patience}; it must be a number of minutes above 0")
        for name in ("join", "listen"):
            if getattr(self, name):
                address(getattr(self, name), f"islands.{name}")

    @property
    def asked(self) -> bool:
        return bool(self.join)


def address(text: str, key: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 2**16:
        raise ValueError(f"{key} is {text!r}; write HOST:PORT, for instance 10.0.0.7:29600")
    return host.strip("[]"), int(port)
