"""`upcycle watch` shows what the files of runs say, and answers only its own page on this machine."""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest
import torch

from evaluation.cli.watch import main
from evaluation.judge.experts import typed
from evaluation.judge.experts.typed import Typed
from evaluation.show import live, server
from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.api import export, prepare
from training.checkpoint import layout
from training.config.reading import read_config
from training.model.decoder import Decoder
from training.observe.metrics import Metrics, read
from training.run.loop import train

NASTY = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny run of slices, a run with a nasty name, and a secret next to it."""
    folder = tmp_path_factory.mktemp("watch")
    tiny.make("llama", folder / "dense", vocab_size=400)
    make_tokenizer(folder / "dense", bos=True)
    prepare(folder / "data", tokenizer=str(folder / "dense"), sources=[str(jsonl(folder / "data.jsonl", texts(40, 0)))])
    moe = {"source": str(folder / "dense"), "experts": 4, "granularity": 2, "top_k": 2, "target": "upcycled",
           "method": "virtual_group"}  # fmt: skip
    words = [
        f"data.train=[{folder / 'data'}]", f"data.valid=[{folder / 'data'}]", "data.sequence=32", "batch=2", "steps=6",
        "log_every=2", "schedule.warmup=1", "device=cpu", "checkpoint.every=3", f"model.upcycle={json.dumps(moe)}",
    ]  # fmt: skip
    train(read_config("", [*words, f"output={folder / 'runs' / 'deep' / 'moe'}"]))
    with Metrics(folder / "runs" / NASTY.replace("/", ""), stream=io.StringIO()) as log:
        log.step(1, tokens=10, loss=torch.tensor(1.0))
        log.log(1, **{f"valid/{NASTY}/loss": 1.0})
    (folder / "secret.txt").write_text("a secret")
    return folder


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(
        self, path: str, body: bytes | None = None, method: str = "", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        link.request(method or ("GET" if body is None else "POST"), path, body, named)
        answer = link.getresponse()
        data, told = answer.read().decode(), dict(answer.getheaders())
        link.close()
        return (
            answer.status,
            json.loads(data) if told.get("Content-Type", "").startswith("application/json") else data,
            told,
        )

    def ask(self, name: str, text: str, **headers: str) -> tuple[int, Any]:
        body = json.dumps({"name": name, "text": text}).encode()
        return self("/text", body, **{"Content_Type": "application/json", **headers})[:2]


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    with server.server(folder, 0) as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Client(found.server_port)
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[Client]:
    with serving(place / "runs") as found:
        yield found


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.texts = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_one_file_that_fetches_nothing_else(client: Client) -> None:
    status, page, headers = client("/")
    assert status == 200 and "://" not in page.replace("http://www.w3.org/2000/svg", "") and "page.css" not in page
    parsed = Parsed(page)
    assert not {"link", "img", "iframe", "form"} & set(parsed.tags) and parsed.tags.count("script") == 1
    policy = headers["Content-Security-Policy"]
    nonce = page.split('<script nonce="')[1].split('"')[0]
    assert policy.startswith("default-src 'none';") and f"script-src 'nonce-{nonce}';" in policy
    assert client("/")[1] != page  # another nonce


def test_runs_are_listed_the_newest_first(client: Client, place: Path) -> None:
    os.utime(place / "runs" / "deep" / "moe" / "metrics.jsonl", (1, 1))
    assert client("/runs")[1] == [NASTY, "deep/moe"]
    assert list(live.shown_in(place / "runs" / "deep" / "moe")) == ["moe"]
    assert list(live.shown_in(place / "data")) == []


def test_a_run_s_page_has_its_numbers(client: Client, place: Path) -> None:
    status, page, _ = client("/run?name=deep%2Fmoe")
    assert status == 200
    said = " ".join(Parsed(page).texts)
    last = read(place / "runs" / "deep" / "moe")[-1]
    assert (
        "step 6 of 6, written at " in said
        and f"{last['loss']:.4f}" in said
        and f"{last['valid/data/loss']:.4f}" in said
    )
    for word in ("Throughput", "Time left", "Load by layer", "The plan", "virtual_group", "Whole FFNs"):
        assert word in said, word
    assert page.count('<svg class="heat"') == 1


def test_a_run_is_shown_while_a_line_is_written(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(place / "runs" / "deep" / "moe", folder)
    before = live.page_of("run", folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
        file.flush()
        assert "step 6 of 6" in live.page_of("run", folder)
    (folder / "metrics.jsonl").write_text("")
    assert "The plan" in live.page_of("run", folder) and "step 6 of 6" in before


def test_texts_of_files_are_texts(client: Client) -> None:
    status, page, _ = client(f"/run?name={quote(NASTY)}")
    parsed = Parsed(page)
    assert (
        status == 200 and "img" not in parsed.tags and NASTY in parsed.texts and f"Validation, {NASTY}" in parsed.texts
    )


def test_a_text_has_the_experts_that_the_model_chooses(client: Client, place: Path) -> None:
    """Compare with the routers of an export, by a hook."""
    status, found = client.ask("deep/moe", "the cat " + NASTY)
    assert (
        status == 200 and found["checkpoint"] == "step-00000006" and (found["experts"], found["granularity"]) == (8, 2)
    )
    assert found["pieces"][0] == "<bos>" and "".join(found["pieces"][1:]) == "the cat " + NASTY
    export(place / "runs" / "deep" / "moe", place / "exported")
    with layout.opened(place / "exported") as origin:
        model = layout.load(Decoder(origin.spec, experts="reference"), origin)
    encoder = typed.tokens.load_tokenizer(place / "dense")
    ids = torch.tensor([encoder.encode("the cat " + NASTY).ids])
    seen: list[Any] = []
    for layer in model.layers.values():
        layer.ffn.router.register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        model(ids)
    assert [layer["layer"] for layer in found["layers"]] == list(range(len(seen)))
    for layer, routing in zip(found["layers"], seen, strict=True):
        assert [sorted(each) for each in layer["experts"]] == [sorted(each) for each in routing.expert_TK.tolist()]
        assert all(sorted(each, reverse=True) == each for each in layer["weights"])
        chosen = dict(zip(routing.expert_TK[3].tolist(), routing.weight_TK[3].tolist(), strict=True))
        assert dict(zip(layer["experts"][3], layer["weights"][3], strict=True)) == pytest.approx(chosen, abs=1e-3)
    assert live.page_of("x", place / "exported").count("<section>") >= 1  # a model without a log


def test_the_model_is_loaded_once_and_again_for_a_new_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "runs" / "deep" / "moe", tmp_path / "run")
    steps = tmp_path / "run" / "checkpoints"
    (steps / "step-00000006").rename(tmp_path / "later")
    loads: list[Path] = []
    real = typed.load
    monkeypatch.setattr(typed, "load", lambda folder: (loads.append(folder), real(folder))[1])
    found = Typed()
    assert [found.routing(tmp_path / "run", "a text")["checkpoint"] for _ in range(2)] == ["step-00000003"] * 2
    (tmp_path / "later").rename(steps / "step-00000006")
    assert found.routing(tmp_path / "run", "a text")["checkpoint"] == "step-00000006" and len(loads) == 2
    long = found.routing(tmp_path / "run", "word " * 2000)
    assert len(long["pieces"]) == len(long["layers"][0]["experts"]) <= typed.LONGEST


def test_what_cannot_be_answered_is_one_sentence(client: Client) -> None:
    for name, text, status, says in (
        (NASTY, "a text", 422, ""),
        ("../secret.txt", "a text", 404, "there is no such run"),
        ("deep/moe", 7, 400, "text is 7"),
    ):
        got, answer = client.ask(name, text)  # type: ignore[arg-type]
        assert (got, set(answer)) == (status, {"error"}), answer
        assert "\n" not in answer["error"] and says in answer["error"]


@pytest.mark.parametrize("path", [
    "/../secret.txt", "/%2e%2e/secret.txt", "/run?name=../secret.txt", "/run?name=..", "/run?name=/etc", "/run?name=",
    "/run", "/run?name=deep", "/run?name=deep/moe/../moe", "/run?name=deep%2Fmoe%00", "//etc/passwd", "/runs/", "/text",
    "/watch.html", "/deep/moe/metrics.jsonl",
])  # fmt: skip
def test_no_path_leads_to_another_file(client: Client, path: str) -> None:
    status, answer, headers = client(path)
    assert status == 404 and set(answer) == {"error"} and "secret" not in str(answer)
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Host": "evil.example:8099"}, {"Host": "127.0.0.1.evil.example"}, {"Host": ""},
    {"Host": "localhost.evil:80"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
    {"Host": "localhost:1", "Origin": "http://localhost:2"},
])  # fmt: skip
def test_another_host_or_origin_is_refused(client: Client, headers: dict[str, str]) -> None:
    for path in ("/", "/runs", "/run?name=deep%2Fmoe"):
        assert client(path, **headers)[0] == 403
    assert client.ask("deep/moe", "a text", **headers)[0] == 403


def test_names_of_this_machine_are_accepted(client: Client) -> None:
    for host in ("localhost", "127.0.0.1:1234", f"localhost:{client.port}"):  # ssh -L may forward another port
        assert client("/runs", Host=host, Origin=f"http://{host}")[0] == 200


def test_requests_are_bounded(client: Client) -> None:
    json_type = {"Content_Type": "application/json"}
    assert client("/text", b"x" * (server.MOST + 1), **json_type)[0] == 413
    assert client("/text", b"{}", **json_type, Content_Length="9" * 30)[0] == 413
    assert client("/text", b"{}", **json_type, Content_Length="0" * 9 + "9" * 15)[0] == 413
    assert client("/text", b"{}", **json_type, Content_Length="-1")[0] == 413
    assert client("/text", b"{}", Content_Type="text/plain")[0] == 415
    assert client("/text", b"[" * 50_000, **json_type)[0] == 400
    assert client("/text", b"\xff", **json_type)[0] == 400
    assert client("/other", b"{}", **json_type)[0] == 404
    assert client("/", method="PUT")[0] == 501
    assert client("/" + "x" * 70_000)[0] == 414


def test_only_this_machine_reaches_it(client: Client, place: Path) -> None:
    with server.server(place / "runs", 0) as found:
        assert found.server_address[0] == "127.0.0.1"
        port = found.server_port
        with pytest.raises(ValueError, match=rf"port={port} cannot be used \(.*\); write port={port + 1}"):
            server.server(place / "runs", port)
    with socket.create_connection(("127.0.0.1", client.port)) as link:
        link.sendall(b"GET /runs HTTP/1.1\r\n\r\n")  # no Host at all
        assert b" 403 " in link.recv(100)


def test_the_command_refuses_what_it_cannot_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        ([str(tmp_path)], "holds no run and no model"),
        ([str(tmp_path / "nowhere")], "holds no run and no model"),
        ([str(tmp_path), "port=70000"], "port is 70000; it must be 0 to 65535"),
        ([], "write FOLDER [key=value ...]"),
    ):
        assert main(words) == 2 and says in capsys.readouterr().err
