"""Define and check the keys of islands."""

from __future__ import annotations

from dataclasses import dataclass

from upcycle.config.values import MINUTES, Rule, above_zero, at_least, check_values, finite, share_of_one

LOCAL = 64  # islands that are tried on one machine, at most: each is a process
MOST = 65536  # islands of a server, at most


@dataclass(frozen=True)
class IslandsConfig:
    join: str = ""  # HOST:PORT of the server (islands.serve=true) that this island joins
    serve: bool = False  # be the server that islands join, and do not train
    local: int = 0  # try islands on this machine: start a server and this many islands as processes; 0: do not
    name: str = ""  # name by which the server knows this island; "": the name of the output folder
    rule: str = "dgs"  # how islands learn from each other, a file of training/islands/rules: dgs | diloco | dense
    every: int = 20  # steps of an island between its exchanges
    share: float = 0.02  # share of each matrix that an exchange sends; dense and diloco send all
    answer: float = 0.0  # share of each matrix that the server answers with; 0: every number that differs
    momentum: float = 0.0  # dgs: momentum of SAMomentum, which sends 1 - momentum of the residual; 0: error feedback
    keep: bool = True  # dgs: an island continues with what it learned and did not send; false: without it, as published
    gain: float = 0.0  # factor of each delta that is sent; 0: the rule's own (dgs: 1 / islands)
    age: int = 50  # exchanges after which an expert with few tokens sends everything; 0: never
    listen: str = "0.0.0.0:29600"  # serve: HOST:PORT to listen on
    count: int = 0  # serve: end, with an export, after this many islands have pushed and left; 0: never end
    most: int = 32  # serve: most islands at once; the server keeps the model in float32 once for each
    secret: str = ""  # file with the secret that server and islands share, at least 16 bytes
    certificate: str = ""  # TLS: PEM file with the certificate and key of the server (serve) or of this island
    authority: str = ""  # TLS: PEM file with the certificate that must have signed the other side's
    throttle: float = 0.0  # Gb/s to slow this island's link down to, for trials; 0: full speed
    patience: float = 10.0  # minutes for which an island tries to reach the server, and a round waits for an island

    def __post_init__(self) -> None:
        if self.join and self.local:
            raise ValueError(
                f"islands.join={self.join} and islands.local={self.local} are both set; remove one of them"
            )
        rules = {
            "local": at_least(0, most=LOCAL),
            "age count": at_least(0),
            "every": at_least(1),
            "most": at_least(1, most=MOST),
            "share": Rule(lambda value: 0 < value <= 1, "it must be above 0 and at most 1"),
            "answer": share_of_one("it must be from 0 (everything) to 1"),
            "momentum": Rule(lambda value: 0 <= value < 1, "it must be at least 0 and below 1"),
            "gain throttle": finite(),
            "patience": above_zero("it must be a number of minutes above 0", most=MINUTES),
        }
        check_values(self, "islands.", rules)
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
