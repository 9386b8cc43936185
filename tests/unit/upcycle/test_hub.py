"""A plan of a model on the Hub fetches headers alone; what goes there is whole, says what it is, and names no folder of
the machine that it was made on. The Hub is a substitute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, get_local_safetensors_metadata

from tests.parity import tiny
from upcycle import plan as plan_of
from upcycle.__main__ import main
from upcycle.io import hub
from upcycle.io.checkpoint import Checkpoint
from upcycle.verifying.verify import verify

WORDS = ["target=mixtral", "experts=4", "top_k=2"]
CARD = "---\nlicense: other\nlicense_name: tiny-license\nlicense_link: LICENSE\ntags:\n- x\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make("llama", tmp_path_factory.mktemp("somewhere-private") / "dense")
    (folder / "README.md").write_text(CARD)
    for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md"):
        (folder / name).write_text(f"the text of {name}")
    (folder / "licenses-of-others").mkdir()
    (folder / "secrets.txt").write_text("x")
    return folder


@pytest.fixture(scope="module")
def moe(dense: Path) -> Path:
    assert main(["convert", f"source={dense}", f"output={dense.parent / 'moe'}", *WORDS]) == 0
    return dense.parent / "moe"


@pytest.fixture
def remote(dense: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The dense model on the Hub, and what was asked of it."""
    asked: list[Any] = []

    def download(name: str, file: str, revision: str | None = None) -> str:
        asked.append((name, file, revision))
        return str(dense / file)

    def headers(name: str, revision: str | None = None) -> Any:
        asked.append((name, "headers", revision))
        return get_local_safetensors_metadata(dense)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched the weights"))
    return asked


def test_a_plan_of_a_hub_id_fetches_headers_alone(dense: Path, remote: list[Any]) -> None:
    there, here = plan_of(source="org/tiny@v1", experts=4), plan_of(source=str(dense), experts=4)
    assert remote == [("org/tiny", "config.json", "v1"), ("org/tiny", "headers", "v1")]
    assert there.outputs == here.outputs and there.hf_config == here.hf_config and there.hash == here.hash
    assert "org/tiny" in str(there)
    with (
        hub.headers("org/tiny") as headers,
        pytest.raises(ValueError, match="only headers of org/tiny were downloaded"),
    ):
        headers.read(next(iter(headers.entries)))


def test_headers_of_a_stranger_are_checked_as_a_files(dense: Path, remote: list[Any], monkeypatch: Any) -> None:
    good = get_local_safetensors_metadata(dense)
    [(file, found)] = good.files_metadata.items()
    name, info = next(iter(found.tensors.items()))
    cases: list[tuple[dict[str, Any], str]] = [
        ({file: SimpleNamespace(tensors={**found.tensors, name: replace(info, shape=[2**40])})}, "bytes, but shape"),
        ({file: SimpleNamespace(tensors={**found.tensors, "a\x00b": info})}, "printable"),
        ({file: found, "other.safetensors": found}, "in two files"),
        ({}, "has no tensors"),
    ]
    for files, said in cases:
        monkeypatch.setattr(
            huggingface_hub,
            "get_safetensors_metadata",
            lambda *_, files=files, **__: SimpleNamespace(files_metadata=files),
        )
        with pytest.raises(ValueError, match=said):
            hub.headers("org/tiny")


def test_a_hub_that_does_not_answer_is_a_sentence_and_none_is_asked_offline(
    dense: Path, remote: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(Exception):
        """Of an HTTP library."""

    def gone(*_: Any, **__: Any) -> Any:
        raise Gone("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", gone)
    assert main(["plan", "source=org/tiny"]) == 2
    assert "org/tiny is not a local folder and cannot be downloaded from the Hub: no route" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(dense))
    assert main(["plan", "source=org/tiny"]) == 0  # of what was downloaded before


def test_the_card_is_the_hubs_own_and_names_no_folder(dense: Path, moe: Path) -> None:
    text = (moe / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "tiny-license", "LICENSE")
    assert (data["pipeline_tag"], data["library_name"]) == ("text-generation", "transformers")
    assert data["tags"] == ["moe", "upcycled", "mixtral"] and "base_model" not in data
    assert str(dense.parent) not in text and "somewhere-private" not in text
    for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md"):
        assert (moe / name).read_bytes() == (dense / name).read_bytes()
    assert not (moe / "licenses-of-others").exists() and not (moe / "secrets.txt").exists()


@pytest.mark.parametrize(
    ("source", "donors", "base"),
    [
        ("org/tiny@v1", (), "org/tiny"),
        ("cache/models--org--tiny-1.5/snapshots/0123abc", (), "org/tiny-1.5"),
        ("folder", (), None),
        ("org/tiny", ("org/a", "folder"), ["org/tiny", "org/a"]),
    ],
)
def test_a_base_is_named_by_its_hub_id_alone(dense: Path, source: str, donors: Any, base: Any) -> None:
    from upcycle.converting import card

    plan = plan_of(source=str(dense), experts=4)
    named = replace(plan, config=replace(plan.config, source=source, donors=donors))
    assert ModelCard(card.text(named, dense)).data.to_dict().get("base_model") == base
    (dense / "README.md").write_text("---\nlicense: [\n---\n")
    assert "license" not in ModelCard(card.text(named, dense)).data.to_dict()
    (dense / "README.md").write_text(CARD)


def test_push_lists_what_it_would_send_and_sends_that(
    dense: Path, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: dict[str, Any] = {}

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            sent["repo"] = (name, options)

        def create_commit(self, name: str, operations: Any, **_: Any) -> Any:
            sent["files"] = {each.path_in_repo: each for each in operations}
            return SimpleNamespace(commit_url=f"https://example.org/{name}")

    looked, upload = list[hub.Upload](), hub.upload

    def look(folder: Any) -> hub.Upload:
        looked.append(upload(folder))
        return looked[-1]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(hub, "upload", look)
    (moe / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main(["push", str(moe), "org/moe", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert not sent and "stays  notes.txt" in shown and "to org/moe" in shown
    assert main(["push", str(moe), "org/moe", "private=true"]) == 0
    assert sent["repo"] == ("org/moe", {"private": True, "exist_ok": True})
    assert len(looked) == 2, "each command looks through the folder once, and sends what it listed"
    assert [*sent["files"]] == [name for name, _ in looked[1].files]
    assert {"config.json", "model.safetensors", "README.md", "LICENSE", "upcycle.json"} <= sent["files"].keys()
    assert "notes.txt" not in sent["files"] and all(f"  {name}\n" in shown for name in sent["files"])
    everything = b"".join(
        each.path_or_fileobj if isinstance(each.path_or_fileobj, bytes) else Path(each.path_or_fileobj).read_bytes()
        for each in sent["files"].values()
    )
    assert b"somewhere-private" not in everything
    # whoever downloads it can still hold it to its plan
    for name, each in sent["files"].items():
        content = each.path_or_fileobj
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
    assert verify(str(dense), str(tmp_path), [], 32, 16).held
    assert hub.push(moe, "org/again") == "https://example.org/org/again" and sent["repo"][1]["private"] is False
    (moe / "notes.txt").unlink()


def test_what_cannot_be_pushed_is_a_sentence(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    class Refusing:
        def create_repo(self, *_: Any, **__: Any) -> None:
            raise OSError("401 Unauthorized")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    cases = [
        (["./moe"], "'./moe' is not a Hub name"),
        (["org/x@v"], "is not a Hub name; write it as org/name"),
        (["org/x"], "401 Unauthorized"),
    ]
    for words, said in cases:
        assert main(["push", str(moe), *words]) == 2
        assert said in capsys.readouterr().err
    copy = shutil.copytree(moe, tmp_path / "copy")
    (copy / "README.md").unlink()
    assert main(["push", str(copy), "org/x"]) == 2
    assert "has no README.md" in capsys.readouterr().err
    (tmp_path / "outside").write_text("a key")
    (copy / "README.md").symlink_to(tmp_path / "outside")
    assert main(["push", str(copy), "org/x"]) == 2
    assert "is a link or not a file" in capsys.readouterr().err
    (copy / "README.md").unlink()
    (copy / "README.md").write_text("x")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert main(["push", str(copy), "org/x"]) == 2
    assert "cut short" in capsys.readouterr().err
    assert json.loads((copy / "config.json").read_text()) and Checkpoint


def test_a_plan_of_a_hub_id_needs_nothing_that_only_a_test_imports() -> None:
    """In a new process: parts of huggingface_hub that another module imported are there in this one."""
    command = [sys.executable, "-m", "upcycle", "plan", "llama3-8b-e8t2", "source=nobody/nothing"]
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith(
        "upcycle: nobody/nothing is not a local folder and cannot be downloaded from the Hub: "
    )
