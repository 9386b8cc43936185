"""What comes from an object store is what its list says, or it is refused; what goes there is complete or not seen."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from upcycle.io import publish, remote, strict
from upcycle.io.remote import Damaged, Store, is_url

LIST = "list.json"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = fsspec.filesystem("memory")
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    remote.fetch.cache_clear()


def stated(folder: Path) -> Mapping[str, remote.File]:
    files: Mapping[str, remote.File] = strict.read_object(folder / LIST)["files"]
    return files


def folder(tmp_path: Path, **files: bytes) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    for name, data in files.items():
        (made / f"{name}.bin").write_bytes(data)
    (made / LIST).write_bytes(publish.signed({"files": publish.listed(made.glob("*.bin"))}))
    return made


def test_an_address_is_told_from_a_folder() -> None:
    assert is_url("s3://b/x") and is_url("memory://x") and is_url("hf://org/name")
    assert not any(map(is_url, ("./x", "org/name", "/a://b", "", "C:\\x")))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_folder_comes_back_as_it_was_sent_and_is_fetched_once(kind: str, tmp_path: Path, capsys: Any) -> None:
    url = "memory://bucket/made" if kind == "memory" else f"file://{tmp_path}/bucket/made"
    made = folder(tmp_path, a=b"1" * 1000, b=b"")
    remote.push_folder(made, url, LIST)
    for _ in range(2):
        remote.fetch.cache_clear()
        there = remote.fetch(url, LIST, stated, ())
        assert {path.name: path.read_bytes() for path in there.iterdir()} == {
            path.name: path.read_bytes() for path in made.iterdir()
        }
    assert capsys.readouterr().err.count("fetching") == 1
    assert sorted(path.name for path in there.parent.iterdir()) == [there.name]  # neither a lock nor a partial folder
    (made / "a.bin").write_bytes(b"2" * 1000)
    (made / LIST).write_bytes(publish.signed({"files": publish.listed(made.glob("*.bin"))}))
    remote.push_folder(made, url, LIST)
    remote.fetch.cache_clear()
    assert (remote.fetch(url, LIST, stated, ()) / "a.bin").read_bytes() == b"2" * 1000


def test_the_list_is_removed_first_and_written_last(tmp_path: Path, memory: Any, monkeypatch: Any) -> None:
    made, order = folder(tmp_path, a=b"1", b=b"2"), list[str]()
    remote.push_folder(made, "memory://b/m", LIST)
    for name in ("put", "remove"):
        real = getattr(Store, name)
        monkeypatch.setattr(
            Store,
            name,
            lambda self, file, *rest, r=real, n=name: (order.append(f"{n} {file}"), r(self, file, *rest))[1],
        )
    remote.push_folder(made, "memory://b/m", LIST)
    assert order[0] == f"remove {LIST}" and order[-1] == f"put {LIST}" and len(order) == 4


def test_a_push_that_fails_on_the_way_leaves_no_list(tmp_path: Path, memory: Any, monkeypatch: Any) -> None:
    made, real = folder(tmp_path, a=b"1", b=b"2"), type(memory).put_file
    remote.push_folder(made, "memory://b/m", LIST)

    def fails(self: Any, source: str, target: str, **more: Any) -> Any:
        if target.endswith("b.bin"):
            raise RuntimeError("no route\nto host")
        return real(self, source, target, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", fails)
        with pytest.raises(ValueError, match=r"memory://b/m cannot be written at b.bin: no route$"):
            remote.push_folder(made, "memory://b/m", LIST)
    assert LIST not in Store("memory://b/m").files()
    with pytest.raises(ValueError, match=r"has no list\.json"):
        remote.fetch("memory://b/m", LIST, stated, ())

    def loses(self: Any, source: str, target: str, **more: Any) -> Any:
        real(self, source, target, **more)
        if target.endswith("b.bin"):
            self.pipe_file(target, b"")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", loses)
        with pytest.raises(ValueError, match=r"b\.bin has 0 bytes after 1 were sent"):
            remote.push_folder(made, "memory://b/m", LIST)
    assert LIST not in Store("memory://b/m").files()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.bin", b"2", "damaged: its sha256 is not"),
        ("a.bin", b"", "fewer than its 1 bytes"),
        ("a.bin", b"1" * 9_000_000, "more than its 1 bytes"),
        ("a.bin", None, "is missing"),
    ],
)
def test_a_file_that_is_not_the_stated_one_is_refused(
    name: str, data: bytes | None, said: str, tmp_path: Path, memory: Any
) -> None:
    remote.push_folder(folder(tmp_path, a=b"1"), "memory://b/m", LIST)
    memory.rm_file(f"/b/m/{name}")
    if data is not None:
        memory.pipe_file(f"/b/m/{name}", data)
    with pytest.raises(Damaged, match=said):
        remote.fetch("memory://b/m", LIST, stated, ())
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.name for path in cached] == [LIST] and ".partial" in str(cached[0])  # no name, no byte of the file


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", ".hidden", "a/b/c/d", ""])
def test_a_list_with_a_name_that_is_not_plain_is_refused(name: str, tmp_path: Path, memory: Any) -> None:
    text = publish.signed({"files": {name: {"bytes": 1, "sha256": hashlib.sha256(b"1").hexdigest()}}})
    memory.pipe_file(f"/b/m/{LIST}", text)
    with pytest.raises(Damaged, match="not a plain name"):
        remote.fetch("memory://b/m", LIST, stated, ())
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("name", ["/b/m/../evil", "/etc/evil", "/b/m/..\\evil", "/b/m//evil"])
def test_a_store_that_lists_a_name_outside_of_the_folder_is_refused(name: str, memory: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(memory), "ls", lambda *_, **__: [{"name": name, "size": 1, "type": "file"}])
    with pytest.raises(ValueError, match="which is not in it"):
        Store("memory://b/m").files()


def test_other_names_and_deep_folders_are_not_taken(memory: Any) -> None:
    for name in ("a", "x/b", "x/y/c", "x/y/z/d", ".hidden", "x/.hidden", "sp ace"):
        memory.pipe_file(f"/b/m/{name}", b"1")
    assert Store("memory://b/m").files() == {"a": 1, "x/b": 1, "x/y/c": 1}
    assert Store("memory://b/none").files() == {}


def test_a_restart_keeps_the_files_that_were_fetched(tmp_path: Path, memory: Any, monkeypatch: Any) -> None:
    remote.push_folder(folder(tmp_path, a=b"1", b=b"2"), "memory://b/m", LIST)
    real, asked = Store.blocks, list[str]()

    def blocks(self: Store, name: str, file: remote.File) -> Any:
        asked.append(name)
        if name == "b.bin" and asked.count(name) == 1:
            raise ValueError("the network is down")
        return real(self, name, file)

    monkeypatch.setattr(Store, "blocks", blocks)
    with pytest.raises(ValueError, match="network"):
        remote.fetch("memory://b/m", LIST, stated, ())
    there = remote.fetch("memory://b/m", LIST, stated, ())
    assert (there / "a.bin").read_bytes() == b"1" and asked.count("a.bin") == 1 and asked.count("b.bin") == 2


def test_a_folder_without_a_list_gives_the_files_of_the_patterns(tmp_path: Path, memory: Any) -> None:
    for name in ("config.json", "model.safetensors", "model.bin", "deep/x.json"):
        memory.pipe_file(f"/b/m/{name}", b"1")
    there = remote.fetch("memory://b/m", LIST, stated, ("*.json", "*.safetensors"))
    assert sorted(path.name for path in there.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/x", r"the address s3://\.\.\.@bucket/x has a password"),
        ("simplecache::s3://b/x", "is not the address of a folder"),
        ("s3://b/../x", "is not the address of a folder"),
        ("nothing://b/x", "cannot be opened"),
    ],
)
def test_an_address_that_cannot_be_used_is_a_sentence(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        Store(url)
    assert "secret" not in str(error.value)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r'needs the package s3fs, .* pip install "upcycle\[storage\]"'):
        Store("s3://bucket/x")
