"""Islands without models, to be killed: a server and islands whose every push is known beforehand.

    python -m tests.islands --kills 50 --seed 0        processes, a slow link, SIGKILL at random moments: minutes
    python -m tests.islands --frames 10000             changed frames at a server in this process
    python -m tests.islands --flips 150                one changed bit in the log or the snapshot of a server's folder
    python -m tests.islands --poison 50                islands with the secret that push what harms
    python -m tests.islands --floods 50                crowds of connections while an island exchanges and others join
    python -m tests.islands --codec 40                 bytes a number and GB/s of a model of 40 M numbers, one core (--device cuda: a GPU)

Each island makes a fixed number of pushes of numbers whose sums are exact in float32. So whatever was killed, cut, sent
twice or came late: in the end the model must be its start minus every push, once, bit for bit; and each island must have
what the server says it has. Islands keep what a run's checkpoint would hold, not after every push.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.islands import center
from training.islands.center import Bounds, Center
from training.islands.config import IslandsConfig
from training.islands.journal import Journal
from training.islands.link import frames, wire
from training.islands.link.client import Link
from training.islands.link.frames import Channel
from training.islands.link.server import BLOCK, STRANGERS, Server
from training.islands.places import Layout
from training.islands.rules.dgs import Push
from training.islands.sparse import Sparse
from upcycle.io import disk

SECRET = b"0123456789abcdef0123456789abcdef"
LAYOUT = Layout({"layers.0.ffn.experts.up": (4, 1000), "layers.0.attention.q.weight": (50, 40), "norm.weight": (99,)})
SHARE = 0.02
HEAD: dict[str, Any] = {"steps": 1, "tokens": 1, "decay": 0.0, "all": False}


def start() -> Tensor:
    return torch.randint(-63, 64, (LAYOUT.size,), generator=torch.Generator().manual_seed(0)) / 64.0


def delta(name: str, seq: int) -> Tensor:
    """What an island learns before its push number `seq`: dyadic, small enough for exact sums."""
    seed = sum(map(ord, name)) * 100_003 + seq
    return torch.randint(-3, 4, (LAYOUT.size,), generator=torch.Generator().manual_seed(seed)) / 64.0


class Islander:
    """An island whose training is `delta`. Its pushes are the largest of what is not sent, the last one all."""

    def __init__(self, name: str, port: int, pushes: int, folder: Path | None = None, throttle: float = 0.0) -> None:
        self.name, self.pushes, self.file = name, pushes, None if folder is None else folder / f"{name}.safetensors"
        self.config = IslandsConfig(join=f"127.0.0.1:{port}", throttle=throttle, patience=1)
        self.has, self.unsent, self.seq = start(), torch.zeros(1, LAYOUT.size), 0
        if self.file is not None and self.file.exists():
            kept = load_file(self.file)
            self.has, self.unsent, self.seq = kept["has"], kept["unsent"], int(kept["seq"])
        who = {
            "name": name,
            "layout": LAYOUT.digest,
            "rule": "dgs",
            "has": self.file is not None and self.file.exists(),
        }
        self.link = Link(self.config, SECRET, who, self.seq)
        self.told: dict[str, Any] = {}

    def join(self) -> dict[str, Any]:
        self.told = self.link.introduce(max(1 << 17, wire.most(LAYOUT.size)) + 2 * BLOCK)
        if not self.told["goes_on"]:
            data = b"".join(
                self.link.ask(frames.TAKE, at.to_bytes(8, "little")) for at in range(0, 4 * LAYOUT.size, BLOCK)
            )
            self.has = torch.frombuffer(bytearray(data), dtype=torch.float32)
            self.unsent.zero_()
            self.seq = self.told["seq"]
        return self.told

    def message(self) -> bytearray:
        last = self.seq + 1 == self.pushes
        count = LAYOUT.size if last else round(SHARE * LAYOUT.size)
        sent = Push(self.unsent).push(delta(self.name, self.seq + 1)[None], [count])
        return center.join(HEAD, wire.encode(sent, LAYOUT.size))

    def exchange(self) -> None:
        data = self.message()
        self.take(self.link.ask(frames.PUSH, data, self.seq + 1))

    def take(self, answer: bytes) -> None:
        found = wire.decode(center.split(answer)[1], LAYOUT.size)
        self.has[found.index] += found.value
        self.seq += 1
        self.link.seq = self.seq

    def keep(self) -> None:
        assert self.file is not None
        data = {"has": self.has, "unsent": self.unsent, "seq": torch.tensor(self.seq)}
        scratch = self.file.with_name(f"{self.name}.new")
        save_file(data, scratch)
        os.replace(scratch, self.file)

    def run(self, every: int = 4) -> None:
        self.join()
        while self.seq < self.pushes:
            self.exchange()
            if self.seq % every == 0:
                self.keep()
        self.keep()
        self.link.leave()


def expected(pushes: dict[str, int]) -> Tensor:
    """The model after all pushes of all islands."""
    return start() - sum(delta(name, seq) for name, last in pushes.items() for seq in range(1, last + 1))


def made(folder: Path, listen: str = "127.0.0.1:0", **words: Any) -> tuple[Center, Journal, Server]:
    config = IslandsConfig(listen=listen, **words)
    here = Center(LAYOUT, start(), config, bounds=Bounds(rate=0.05))
    here.rule.worth = 0.0  # so that every number is told
    journal = Journal(folder, here)
    return here, journal, Server(here, journal, config, SECRET)


@contextmanager
def serving(folder: Path, **words: Any) -> Iterator[Server]:
    """A server in a thread. It ends as if it were killed: nothing is saved."""
    _, journal, server = made(folder, **words)
    thread = threading.Thread(target=server.run, args=(lambda: False,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)
        journal.close()


@contextmanager
def channel(server: Server, name: str = "mutant", seq: int = 0) -> Iterator[Channel]:
    """An island's end of a connection that has joined."""
    mine = socket.create_connection(("127.0.0.1", server.port), 20)
    mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as an island's; else each frame waits 40 ms for an ACK
    found = Channel(mine)
    try:
        found.meet(SECRET)
        who = {"name": name, "layout": LAYOUT.digest, "rule": "dgs", "has": name in server.center.members}
        found.send(frames.JOIN, seq, payload=json.dumps(who).encode())
        assert found.receive(1 << 16).kind == frames.OK
        yield found
    finally:
        mine.close()


def mutate(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        kind, at = draw.randrange(5), draw.randrange(max(len(out), 1)) if draw.random() < 0.5 else draw.randrange(64)
        at = min(at, len(out) - 1)
        if kind == 0:
            out[at] = draw.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del out[at : at + draw.randint(1, 8)]
        elif kind == 3:
            out[at:at] = draw.randbytes(draw.randint(1, 8))
        else:
            out[at : at + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")])
        if not out:
            return b"\0"
    return bytes(out)


def mutants(server: Server, count: int, seed: int) -> dict[str, int]:
    """Changed frames. Half are changed on the wire, and must be no frames at all; half by somebody who has the secret,
    and must be refused or be a push that counts as it is."""
    draw, found = random.Random(seed), {"cut": 0, "refused": 0, "taken": 0}
    total, quarantined = server.center.rule.model.clone(), 0
    wires: list[bytes] = []
    for number in range(count):
        sent = Sparse(torch.tensor([1, 5000]), torch.tensor([0.5, -0.25]))
        good = center.join(HEAD, wire.encode(sent, LAYOUT.size))
        name = f"mutant-{quarantined}"
        member = server.center.members.get(name)
        seq = 0 if member is None else member.seq
        with channel(server, name, seq) as link:
            seq = server.center.members[name].seq
            if number % 2:
                data = mutate(good, draw)
                link.send(frames.PUSH, seq + 1, payload=data)
                kind = link.receive(1 << 20).kind
                assert kind in (frames.OK, frames.NO, frames.AGAIN)
                if kind == frames.OK:
                    taken = wire.decode(center.split(data)[1], LAYOUT.size)
                    total[taken.index] -= taken.value
                    found["taken"] += 1
                else:
                    found["refused"] += 1
                if server.center.members[name].bad:
                    quarantined += 1
                    total = server.center.rule.model.clone()  # its last pushes are taken back
            else:
                wires.clear()
                link.write = lambda data: wires.append(bytes(data))  # type: ignore[method-assign]
                link.send(frames.PUSH, seq + 1, payload=good)
                whole = b"".join(wires)
                changed = mutate(whole, draw)
                if changed.startswith(whole):
                    continue
                try:
                    link.sock.sendall(changed)
                    link.sock.shutdown(socket.SHUT_WR)
                    link.receive(1 << 20)
                    raise AssertionError("a changed frame was answered")
                except (frames.Cut, OSError):
                    found["cut"] += 1
    assert torch.equal(server.center.rule.model, total), "a frame that was refused has changed the model"
    return found


# ---- damaged folders, and islands that harm


def kept(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state that a server begins with in a folder."""
    here, journal, server = made(folder)
    server.close()
    journal.close()
    return here.state()


def used(folder: Path) -> None:
    """Make a server's folder with two snapshots and their logs."""
    _, journal, server = made(folder)
    server.close()
    ones = [Islander(name, 1, 99) for name in ("a", "b")]
    for one in ones:
        journal.add(frames.JOIN, one.name)
    for number in range(9):
        for one in ones:
            data = one.message()
            journal.add(frames.PUSH, one.name, one.seq + 1, data)
            one.seq += 1
        if number in (3, 6):
            journal.save()
    journal.close()


def flips(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Change one bit in the newest snapshot or its log, and begin a server there. `named`: it says so and refuses;
    `replaced`: it says so and has everything, from the snapshot before; `cut`: it says so, cuts a torn end off, and keeps
    a copy; `silent`: it says nothing."""
    draw, found = random.Random(seed), {"named": 0, "replaced": 0, "cut": 0, "silent": 0}
    used(folder / "good")
    tensors, facts = kept(folder / "good")
    for number in range(count):
        place = folder / f"bad-{number}"
        shutil.copytree(folder / "good", place)
        files = sorted(place.iterdir(), key=lambda path: int("".join(filter(str.isdigit, path.stem))))[-2:]
        file, said = files[number % 2], io.StringIO()
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        outcome = "silent"
        with contextlib.redirect_stderr(said):
            try:
                got, figures = kept(place)
            except ValueError as error:
                outcome = "named" if str(file) in str(error) else "silent"
            else:
                same = figures == facts and all(torch.equal(got[name], tensors[name]) for name in tensors)
                if str(file) in said.getvalue():
                    outcome = "replaced" if same else "cut" if list(place.glob("*.torn-*")) else "silent"
        found[outcome] += 1
        shutil.rmtree(place)
    return found


POISON: list[dict[str, Any]] = [
    {"steps": -1}, {"steps": 10**9}, {"steps": "1"}, {"steps": None}, {"tokens": 10**400}, {"tokens": -1},
    {"decay": None}, {"decay": "abc"}, {"decay": -1.0}, {"decay": 1e6}, {"decay": 1e308}, {"all": "yes"}, {"all": None},
    {"bias_rate": None}, {"bias_rate": "abc"}, {"bias_rate": 1e308}, {"value": 3.38e38}, {"value": 1e30}, {"value": 1e6},
    {"value": 99.0}, {"value": math.inf}, {"value": math.nan},
]  # fmt: skip


def poisons(server: Server, count: int, seed: int) -> dict[str, int]:
    """Islands that push what harms, while a healthy island goes on. What is refused must change nothing; what an island in
    quarantine has pushed before must be taken back."""
    draw, found = random.Random(seed), {"refused": 0, "quarantined": 0, "harmless": 0}
    healthy = Islander("healthy", server.port, count + 1)
    healthy.join()
    for number in range(count):
        change = POISON[number % len(POISON)]
        name = f"bad-{number}"
        index = torch.arange(LAYOUT.size) if draw.random() < 0.5 else torch.tensor([1, 5000])
        good = wire.encode(Sparse(index[:2], torch.tensor([0.5, -0.25])), LAYOUT.size)
        sent = Sparse(index, torch.full((len(index),), change.get("value", 0.5)))
        with channel(server, name) as link:
            link.send(frames.PUSH, 1, payload=center.join(HEAD, good))
            assert link.receive(1 << 20).kind == frames.OK
            head = HEAD | {key: value for key, value in change.items() if key != "value"}
            body = wire.encode(sent, LAYOUT.size) if "value" in change else good
            link.send(frames.PUSH, 2, payload=center.join(head, body))
            answer = link.receive(1 << 20)
            if answer.kind == frames.NO and b"quarantine" in answer.payload:
                found["quarantined"] += 1
            else:
                found["refused" if answer.kind == frames.NO else "harmless"] += 1
                if answer.kind == frames.OK:
                    assert "bias_rate" in change, change
                link.send(frames.LEAVE, 1 + (answer.kind == frames.OK))
                link.receive(1 << 20)
        healthy.exchange()
        assert bool(server.center.rule.model.isfinite().all())
        assert torch.equal(healthy.has, server.center.rule.model), "the healthy island has another model"
    return found


FLOODS = ("silent", "closed", "noise", "half a greeting", "wrong secret", "secret without a name")


def stranger(port: int, how: str, draw: random.Random) -> socket.socket:
    """Open a connection that takes up the server's time, and leave it open."""
    sock = socket.create_connection(("127.0.0.1", port), 20)
    with contextlib.suppress(OSError, frames.Cut, frames.Refused):  # the server may have shed it
        if how == "closed":
            sock.close()
        elif how == "noise":
            sock.sendall(draw.randbytes(draw.randrange(1, 1 << 16)))
        elif how == "half a greeting":
            sock.sendall((frames.MAGIC + bytes(99))[: draw.randrange(1, 60)])
        elif how == "wrong secret":
            Channel(sock).meet(b"another secret, long enough")
        elif how == "secret without a name":
            Channel(sock).meet(SECRET)
    return sock


def floods(server: Server, count: int, seed: int) -> dict[str, int]:
    """Return how many crowds of each kind came. In each, an island that is in must exchange and another must join."""
    draw, found = random.Random(seed), dict.fromkeys(FLOODS, 0)
    within = Islander("within", server.port, 2 * count + 1)
    within.join()
    before = threading.active_count()
    for number in range(count):
        how, size = FLOODS[number % len(FLOODS)], draw.randrange(STRANGERS // 2, 5 * STRANGERS)
        crowd = [stranger(server.port, how, draw) for _ in range(size)]
        within.exchange()
        late = Islander(f"late-{number}", server.port, 9)
        late.join()
        late.exchange()
        within.exchange()
        assert threading.active_count() <= before + STRANGERS + 2, "each connection of a crowd keeps a thread"
        assert torch.equal(within.has, server.center.rule.model), "the island has another model"
        late.link.leave()
        for sock in crowd:
            sock.close()
        found[how] += 1
    assert server.center.pushes == 3 * count
    return found


# ---- processes that are killed


def child(words: list[str]) -> None:
    folder = Path(words[1])
    if words[0] == "serve":
        here, journal, server = made(folder / "server", listen=f"127.0.0.1:{words[2]}", count=int(words[3]))
        server.run(lambda: False)
        journal.save()
        save_file({"model": here.rule.model}, folder / "final.safetensors")
    else:
        Islander(words[0], int(words[2]), int(words[3]), folder, throttle=float(words[4])).run()


def campaign(kills: int, seed: int, islands: int, pushes: int, throttle: float) -> None:
    draw, began = random.Random(seed), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        disk.make_folder(folder)
        names = [f"island-{k}" for k in range(islands)]
        jobs = {name: [name, place, str(port), str(pushes), str(throttle)] for name in names}
        jobs["serve"] = ["serve", place, str(port), str(islands)]
        running: dict[str, subprocess.Popen[bytes]] = {}
        done: set[str] = set()
        killed = {"serve": 0, "island": 0}
        while len(done) < len(jobs):
            for name, words in jobs.items():
                process = running.get(name)
                if name not in done and (process is None or process.poll() is not None):
                    if process is not None and process.returncode == 0:
                        done.add(name)
                    elif process is not None and "serve" in done:
                        done.add(name)  # killed between its leave and its end: nobody is there any more
                    elif process is not None and process.returncode > 0:
                        raise SystemExit(f"{name} ended with {process.returncode}")
                    else:
                        running[name] = subprocess.Popen([sys.executable, "-m", "tests.islands", "--child", *words])
            time.sleep(draw.uniform(0.05, 1.5))
            alive = [name for name, process in running.items() if process.poll() is None]
            if sum(killed.values()) < kills and alive:
                name = "serve" if "serve" in alive and draw.random() < 0.4 else draw.choice(alive)
                running[name].send_signal(signal.SIGKILL)
                running[name].wait()
                killed["serve" if name == "serve" else "island"] += 1
        model = load_file(folder / "final.safetensors")["model"]
        assert torch.equal(model, expected(dict.fromkeys(names, pushes))), "something was lost, or counted twice"
    print(f"{killed['serve']} kills of the server, {killed['island']} of islands; {islands} x {pushes} pushes, each once, "
          f"bit for bit; {time.monotonic() - began:.0f} s")  # fmt: skip


def codec(millions: int, device: str) -> None:
    """Encode and decode, from numbers on a device to bytes in host memory and back."""
    torch.set_num_threads(1)
    size, cuda = millions * 1_000_000, device.startswith("cuda")

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if cuda else time.process_time()  # of a busy core, what it had of it

    for share in (0.01, 0.05, 0.2, 1.0):
        index = (torch.rand(size, device=device) < share).nonzero().flatten()
        sent, times = Sparse(index, torch.randn(len(index), device=device)), [0.0] * 2
        for _ in range(4 if cuda else 1):  # of a GPU the best of some
            began = clock()
            data = wire.encode(sent, size)
            between = clock()
            wire.decode(data, size, device)
            times = [min(a or b, b) for a, b in zip(times, (between - began, clock() - between), strict=True)]
        there, back = (len(data) / taken / 1e9 for taken in times)
        of_model = [2 * size / taken / 1e9 for taken in times]
        print(f"share {share}: {len(data) / len(index):.2f} bytes a number; encode {there:.2f} GB/s, decode {back:.2f} GB/s "
              f"of message; {of_model[0]:.2f} and {of_model[1]:.2f} GB/s of a bfloat16 model", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs="+")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--poison", type=int, default=0)
    parser.add_argument("--floods", type=int, default=0)
    parser.add_argument("--codec", type=int, default=0, help="million numbers")
    parser.add_argument("--device", default="cpu", help="of the codec")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--islands", type=int, default=3)
    parser.add_argument("--pushes", type=int, default=400)
    parser.add_argument("--throttle", type=float, default=0.0005, help="Gb/s")
    words = parser.parse_args()
    if words.child:
        child(words.child)
        return
    if words.codec:
        codec(words.codec, words.device)
    if words.kills:
        campaign(words.kills, words.seed, words.islands, words.pushes, words.throttle)
    if words.flips:
        with tempfile.TemporaryDirectory() as place:
            print(flips(Path(place), words.flips, words.seed))
    if words.poison:
        with tempfile.TemporaryDirectory() as place, serving(Path(place)) as server:
            print(poisons(server, words.poison, words.seed))
    if words.floods:
        with tempfile.TemporaryDirectory() as place, serving(Path(place)) as server:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - a line of the server for each connection
            print(floods(server, words.floods, words.seed))
    if words.frames:
        with tempfile.TemporaryDirectory() as place, serving(Path(place)) as server:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - one line of the server for each
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = mutants(server, words.frames, words.seed)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(f"{words.frames} changed frames: {found}; memory {before / 1e3:.0f} -> {after / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
