"""Serve a page about runs to browsers of this machine, by the standard library's http.server.

A browser runs scripts of strangers, so the server trusts no request: it answers only under its own names (a stranger's
name that points here is refused), runs only the page's own script, opens no path that a request names, and reads a
bounded number of bytes.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from evaluation.judge.experts.typed import Typed
from evaluation.show import live
from evaluation.show.page import HERE, shown
from upcycle.io import strict

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")  # any port: ssh may forward another one
MOST = 1 << 16  # bytes of a request's body
SECONDS = 20  # that a browser may take to send its request
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{}'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def serve(folder: Path, port: int) -> None:
    """Serve until Ctrl-C."""
    with server(folder, port) as serving:
        print(f"http://{ADDRESS}:{serving.server_port} shows {folder}; Ctrl-C ends it", flush=True)
        serving.serve_forever()


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens; raise a ValueError if there is nothing to show, or if the port is taken."""
    if not live.shown_in(folder):
        raise ValueError(
            f"{folder} holds no run and no model; give the folder of a run (metrics.jsonl), or one above it"
        )
    try:
        made = ThreadingHTTPServer((ADDRESS, port), partial(Handler, folder, Typed()))
    except OSError as error:
        raise ValueError(f"port={port} cannot be used ({error.strerror}); write port={port + 1}, or another") from None
    made.daemon_threads = True
    return made


class Handler(BaseHTTPRequestHandler):
    timeout = SECONDS
    server_version, sys_version = "upcycle", ""

    def __init__(self, folder: Path, typed: Typed, *given: Any) -> None:
        self.folder, self.typed = folder, typed
        super().__init__(*given)

    def do_GET(self) -> None:
        if not self.is_ours():
            return
        place = urlsplit(self.path)
        if place.path == "/":
            nonce = secrets.token_urlsafe(16)
            text = (HERE / "watch.html").read_text().replace("NONCE", nonce)
            self.answer(200, text.replace("/* page.css */", (HERE / "page.css").read_text()), "text/html", nonce)
        elif place.path == "/runs":
            self.answer_json(list(live.shown_in(self.folder)))
        elif place.path == "/run":
            self.try_for(parse_qs(place.query).get("name", [""])[0], live.page_of)
        else:
            self.refuse(404, "there is no such page")

    def do_POST(self) -> None:
        if not self.is_ours():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/text":
            return self.refuse(404, "there is no such page")
        if self.headers.get_content_type() != "application/json":  # a stranger's page cannot send it here
            return self.refuse(415, "the request must be application/json")
        if not length.isdecimal() or len(length) > len(str(MOST)) or int(length) > MOST:
            return self.refuse(413, f"a request has at most {MOST} bytes")
        try:
            asked = strict.parse_object(self.rfile.read(int(length)), "the request")
            name, text = (strict.held(asked.get(key), str, key) for key in ("name", "text"))
        except ValueError as error:
            return self.refuse(400, str(error))
        self.try_for(name, lambda _, folder: self.typed.routing(folder, text))

    def is_ours(self) -> bool:
        """Return whether the request is for this server and from its own page; refuse it if not."""
        host, origin = self.headers.get_all("Host") or [], self.headers.get("Origin")
        ours = len(host) == 1 and host[0].partition(":")[0] in NAMES
        if not ours or origin not in (None, f"http://{host[0]}"):
            self.refuse(403, f"open the page under its own name, http://{ADDRESS}")
            return False
        return True

    def try_for(self, name: str, make: Any) -> None:
        """Answer what make(name, folder) returns for a run that is shown, or why it cannot."""
        folder = live.shown_in(self.folder).get(name)
        if folder is None:
            return self.refuse(404, "there is no such run")
        try:
            found = make(name, folder)
        except (ValueError, OSError, RuntimeError) as error:
            return self.refuse(422, " ".join(str(error).split()))
        self.answer_json(found)

    def refuse(self, status: int, why: str) -> None:
        self.close_connection = True  # the rest of the request was not read
        self.answer_json({"error": shown(why)}, status)

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value), "application/json")

    def answer(self, status: int, text: str, kind: str, nonce: str = "none") -> None:
        data = text.encode("utf-8", "replace")
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data)), "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY.format(nonce), "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin", "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the browser has left
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing: the page asks every few seconds."""
