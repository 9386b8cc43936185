"""Read, write and fetch folders of object stores by fsspec: s3://, gs://, hf:// and its other kinds.

A folder has a list of its files with their sizes and sums: a model's upcycle.json, the meta.json of token shards, the
mirror.json of a checkpoint. `push` removes the list first and writes it last, so a folder with a list is complete.

The names, sizes and bytes of a store may come from a stranger. Only plain names are read, nothing above the stated size
is written to the disk, and a file whose bytes differ from its sum never gets its name here.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from upcycle.io import disk, publish, strict
from upcycle.io.strict import Count, first_line, short

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
NAME = re.compile(r"(?:\w[\w.@+=-]*/){0,2}\w[\w.@+=-]*", re.ASCII)  # of a file, in at most two folders
EXTRA = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # packages of the extra `storage`
PART = 32 << 20  # bytes of a request
AT_ONCE = 4  # files that are sent or fetched at the same time
WAIT = 1.0  # seconds between looks at another process's fetch


class File(TypedDict):
    """A file of a list."""

    bytes: Count
    sha256: NotRequired[str]


class Damaged(ValueError):
    """A file of a store is missing, or is not what its list says."""


def is_url(name: str | Path) -> bool:
    """Return whether a name is an address of a store, such as s3://bucket/folder."""
    return isinstance(name, str) and URL.match(name) is not None


class Store:
    """A folder of an object store. Every error is a ValueError of one sentence that names the address."""

    def __init__(self, url: str) -> None:
        self.url, kind = url.rstrip("/"), url.partition("://")[0]
        if re.match(r"[^/]*:[^/]*@", url.partition("://")[2]):
            place = url.rpartition("@")[2]
            raise ValueError(f"the address {kind}://...@{place} has a password, which runs would store; leave it out")
        if "::" in url or ".." in url.split("/"):
            raise ValueError(f"{url} is not the address of a folder; write for instance s3://bucket/folder")
        try:
            from fsspec.core import url_to_fs

            self.fs, root = url_to_fs(self.url, **({"auto_mkdir": True} if kind in ("file", "local") else {}))
        except ImportError as error:
            if kind not in EXTRA:
                raise ValueError(f"{url} cannot be opened: {first_line(error)}") from None
            raise ValueError(
                f'{url} needs the package {EXTRA[kind]}, which is not installed; pip install "upcycle[storage]"'
            ) from None
        except Exception as error:  # packages of stores raise errors of their own
            raise ValueError(f"{url} cannot be opened: {first_line(error)}") from None
        self.root: str = root.rstrip("/")

    def at(self, name: str) -> str:
        assert NAME.fullmatch(name), name
        return f"{self.root}/{name}"

    def files(self) -> dict[str, int]:
        """Return the size of each file with a plain name, also in folders of this one; {} if there is no such folder.

        Raise a ValueError for a name that leads out of the folder."""
        found: dict[str, int] = {}
        folders = [self.root]
        for depth in range(3):
            with asking(self.url, "cannot be listed"):
                self.fs.invalidate_cache()
                entries = [each for folder in folders for each in listed(self.fs, folder)]
            folders = []
            for entry in entries:
                path = str(entry["name"]).rstrip("/")
                if path == self.root:  # a mark that some tools leave for a folder
                    continue
                name = path.removeprefix(f"{self.root}/")
                if name == path or name.startswith("/") or ".." in re.split(r"[/\\]", name):
                    raise ValueError(f"{self.url} lists {short(path)}, which is not in it; use another folder")
                if entry["type"] == "directory" and depth < 2 and NAME.fullmatch(name):
                    folders.append(path)
                elif entry["type"] == "file" and NAME.fullmatch(name):
                    found[name] = int(entry["size"])
        return found

    def read(self, name: str, limit: int = strict.MAX_FILE) -> bytes:
        """Return the bytes of a small file."""
        with (
            asking(self.url, f"cannot be read at {name}"),
            self.fs.open(self.at(name), "rb", cache_type="none") as file,
        ):
            data: bytes = file.read(limit + 1)
        if len(data) > limit:
            raise Damaged(f"{self.url}/{name} has over {limit} bytes, more than such a file may have")
        return data

    def get(self, name: str, path: Path, stated: File) -> None:
        """Write a file to `path`, or raise Damaged if it is not the stated one. Keep a file that already is."""
        if path.is_file() and path.stat().st_size == stated["bytes"] and disk.sha256(path) == stated.get("sha256"):
            return
        disk.make_folder(path.parent)
        disk.write_blocks(path, self.blocks(name, stated))

    def blocks(self, name: str, stated: File) -> Iterator[bytes]:
        """Yield a file's bytes, at most as many as stated; raise Damaged at the end if they differ."""
        digest, left, where = hashlib.sha256(), stated["bytes"], f"{self.url}/{name}"
        with ExitStack() as stack:
            with asking(self.url, f"cannot be read at {name}"):
                file = stack.enter_context(self.fs.open(self.at(name), "rb", cache_type="none"))
            while True:
                with asking(self.url, f"cannot be read at {name}"):
                    block: bytes = file.read(min(PART, left + 1))
                left -= len(block)
                if not block or left < 0:
                    break
                digest.update(block)
                yield block
        if left:
            raise Damaged(f"{where} has {'more' if left < 0 else 'fewer'} than its {stated['bytes']} bytes")
        if stated.get("sha256", digest.hexdigest()) != digest.hexdigest():
            raise Damaged(f"{where} is damaged: its sha256 is not the stated one")

    def get_all(self, files: Mapping[str, File], folder: Path) -> None:
        """Write files to a folder, several at the same time."""
        with ThreadPoolExecutor(AT_ONCE, "fetch") as threads:
            list(threads.map(lambda name: self.get(name, folder / name, files[name]), files))

    def put(self, name: str, content: Path | bytes) -> None:
        """Send a file."""
        with asking(self.url, f"cannot be written at {name}"):
            if isinstance(content, bytes):
                self.fs.pipe_file(self.at(name), content)
            else:
                self.fs.put_file(str(content), self.at(name))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; it need not exist."""
        with asking(self.url, f"cannot be removed at {name}"):
            self.fs.invalidate_cache()
            if self.fs.exists(self.at(name)):
                self.fs.rm(self.at(name), recursive=True)

    def check_writable(self) -> None:
        """Raise a ValueError if the folder cannot be written."""
        self.put("upcycle.written", b"upcycle looks whether it may write here\n")
        self.remove("upcycle.written")


def push(files: Mapping[str, Path | bytes], url: str) -> None:
    """Send files to a store: the last of them, which is the list of the others, at the end.

    An older list is removed first, so that nobody reads old and new files as one folder."""
    store, last = Store(url), [*files][-1]
    store.remove(last)
    with ThreadPoolExecutor(AT_ONCE, "push") as threads:
        list(threads.map(lambda name: store.put(name, files[name]), [*files][:-1]))
    there = store.files()
    for name, content in [*files.items()][:-1]:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if there.get(name) != size:
            raise ValueError(f"{store.url}/{name} has {there.get(name, 'no')} bytes after {size} were sent; send again")
    store.put(last, files[last])


def holds(url: str, manifest: str) -> bool:
    """Return whether a folder of a store is complete."""
    return manifest in Store(url).files()


def push_folder(folder: Path, url: str, last: str) -> None:
    """Send all files of a folder to a store, the list `last` at the end."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and NAME.fullmatch(path.name))
    push({name: folder / name for name in (*(each for each in names if each != last), last)}, url)


# ---- fetching


@cache
def fetch(url: str, manifest: str, stated: Callable[[Path], Mapping[str, File]], patterns: Sequence[str]) -> Path:
    """Return a local copy of a store's folder; a later process finds it in the cache, unless the folder has changed.

    manifest: the name of the list of files. stated: reads the list from a local folder. patterns: names of files to
    fetch although no list has their sums; without them the list must be there."""
    store = Store(url)
    listing = store.files()
    plain = {name: size for name, size in listing.items() if "/" not in name}
    wanted = {name for name in plain if any(fnmatchcase(name, pattern) for pattern in patterns)}
    text = store.read(manifest) if manifest in plain else b""
    if not (text or wanted):
        raise ValueError(f"{url} has no {manifest}, so it was not sent by upcycle, or not all of it")
    known = hashlib.sha256(repr((store.url, stated.__name__, text or sorted(plain.items()))).encode()).hexdigest()
    name = f"{Path(store.root).name or 'folder'}-{known[:16]}"
    final = cache_folder() / name
    with alone(final.with_name(f".{name}.lock"), f"a copy of {url}"):
        if not final.is_dir():
            partial = final.with_name(f"{name}.partial")
            disk.make_folder(partial)
            if text:
                disk.write_atomic(partial / manifest, text)
            files = regular(stated(partial), f"{url}/{manifest}") if text else {}
            if lost := next((each for each in files if each not in plain), ""):
                raise Damaged(f"{url}/{lost} is missing")
            sizes = {each: File(bytes=plain[each]) for each in wanted - files.keys() - {manifest}}
            say(f"fetching {url} to {final}")
            store.get_all({**files, **sizes}, partial)
            publish.rename(partial, final)
    return final


def regular(files: Mapping[str, File], where: str) -> dict[str, File]:
    """Return the files of a list, checked: plain names, sizes and sums."""
    checked: dict[str, File] = strict.held(dict(files), Mapping[str, File], where)
    strange = [name for name in checked if not NAME.fullmatch(name)]
    if strange:
        raise Damaged(f"{where} names a file {short(strange[0])}, which is not a plain name")
    return checked


def cache_folder() -> Path:
    """Return the folder that keeps copies of stores' folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upcycle"


@contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock, after waiting for the process that holds it."""
    waits = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(publish.alone(lock, Path(what)))
                break
            except ValueError as error:
                if not waits and os.environ.get("LOCAL_RANK", "0") == "0":
                    say(str(error).partition(";")[0])
                waits = True
                time.sleep(WAIT)
        yield


# ---- errors and words


@contextmanager
def asking(url: str, what: str) -> Iterator[None]:
    """Turn an error of a store's package into a ValueError of one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{url} {what}: it is missing") from error
    except Exception as error:  # each package has errors of its own
        raise ValueError(f"{url} {what}: {first_line(error)}") from error


def listed(fs: Any, folder: str) -> list[Mapping[str, Any]]:
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
