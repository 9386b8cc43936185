"""Read a model's headers from the Hub without its weights (`headers`), and upload a folder (`push`).

model = hub.headers("org/name")      # downloads kilobytes for a model of any size: enough for a plan
hub.push("./moe", "org/moe")
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upcycle.io.checkpoint import (
    COPIED,
    HUB_ID,
    INDEX,
    MAX_CONFIG,
    MAX_TENSORS,
    TERMS,
    Checkpoint,
    check_entry,
    hub_match,
    not_had,
    public_name,
)  # fmt: skip
from upcycle.io.publish import MANIFEST, MEASURED, damages, signed
from upcycle.io.strict import first_line, parse_object, read_object, read_small, short


class Headers(Checkpoint):
    """A checkpoint on the Hub: only config.json and the headers of the weight files were downloaded."""

    def __init__(self, name: str, config: Path, files: Any) -> None:
        self.folder = Path(name)  # used only in error sentences: no local folder exists
        self._config_bytes = read_small(config, MAX_CONFIG)
        self.config = parse_object(self._config_bytes, config)
        self.files, self._handles, self._stamps, self._open_files = (), {}, {}, ExitStack()
        entries = {}
        for file, found in files.items():
            if len(found.tensors) > MAX_TENSORS:
                raise ValueError(f"{name}/{file} lists {len(found.tensors)} tensors; at most {MAX_TENSORS} are read")
            for tensor, info in found.tensors.items():
                if tensor in entries:
                    raise ValueError(f"tensor {short(tensor)} of {name} is in two files; get an intact model")
                fields = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
                entries[tensor] = check_entry(self.folder / file, tensor, fields, 0)
        if not entries:
            raise ValueError(f"{name} has no tensors; is this the model's name?")
        self.entries = entries

    def read(self, name: str, rows: tuple[int, int] | None = None, *, check: bool = True) -> torch.Tensor:
        raise ValueError(
            f"only headers of {self.folder} were downloaded, so tensor {short(name)} cannot be read; download the model"
        )

    def fingerprint(self) -> str:
        raise ValueError(
            f"only headers of {self.folder} were downloaded, but measurements belong to weights; download the model "
            "and write source=FOLDER"
        )


def headers(source: str | Path) -> Checkpoint:
    """Open a folder, or only config.json and the headers of a hub id; offline, open the Hub's local cache."""
    hub_id = hub_match(source)
    if not hub_id:
        return Checkpoint.open(source)
    import huggingface_hub.constants  # `import huggingface_hub` does not import this module

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return Checkpoint.open(source)
    try:
        config = huggingface_hub.hf_hub_download(hub_id[1], "config.json", revision=hub_id[2])
        found = huggingface_hub.get_safetensors_metadata(hub_id[1], revision=hub_id[2])
    except Exception as error:  # the call may raise errors of three libraries
        raise not_had(source, error) from error
    return Headers(str(source), Path(config), found.files_metadata)


# ---- to the Hub


@dataclass(frozen=True)
class Upload:
    """The files of a folder that `push` uploads (name, and content or path), and the names that it leaves out."""

    folder: Path
    files: tuple[tuple[str, Path | bytes], ...]
    left: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(len(what) if isinstance(what, bytes) else what.stat().st_size for _, what in self.files)


def upload(folder: str | Path) -> Upload:
    """Choose the files to upload: weights, configs, tokenizer, licenses, card, manifest, code named in config.json."""
    folder = Path(folder)
    names = {"README.md", MANIFEST}
    if (folder / "config.json").exists() or not any(folder.glob("*.gguf")):
        with Checkpoint.open(folder) as checkpoint:  # reads and checks every header
            names |= {file.name for file in checkpoint.files} | {"config.json", INDEX, MEASURED}
            code = checkpoint.config.get("auto_map") or {}
        modules = [module for module in (code.values() if isinstance(code, dict) else ()) if isinstance(module, str)]
        names |= {f"{module.partition('.')[0]}.py" for module in modules}
    else:
        names |= whole_gguf(folder)
    names |= {file.name for pattern in (*COPIED, *TERMS) for file in folder.glob(pattern)}
    there = sorted(path for path in folder.iterdir() if path.name in names)
    if link := next((path for path in there if path.is_symlink() or not path.is_file()), None):
        raise ValueError(f"{link} is a link or not a file, and a link may lead to a private file; put a copy there")
    if not (folder / "README.md").is_file():
        raise ValueError(f"{folder} has no README.md, the model card; write one")
    files = tuple((path.name, public_manifest(path) if path.name == MANIFEST else path) for path in there)
    return Upload(folder, files, tuple(sorted(path.name for path in folder.iterdir() if path.name not in names)))


def whole_gguf(folder: Path) -> set[str]:
    """Return the names of a folder's GGUF files; raise a ValueError if its manifest lists others."""
    manifest = folder / MANIFEST
    listed = read_object(manifest).get("files") if manifest.is_file() else None
    if not isinstance(listed, dict):
        raise ValueError(f"{folder} has a GGUF file and no {MANIFEST} that lists it; quantise again")
    try:
        said = next(damages(manifest, listed), "")
    except (KeyError, TypeError) as error:
        said = f"{manifest} does not list its files ({error!r})"
    if said:
        raise ValueError(f"{said}; quantise again")
    return {name for name in listed if name.endswith(".gguf")}


def public_manifest(path: Path) -> bytes:
    """Return the manifest with only the names of folders and files, without their paths on this machine."""
    manifest = read_object(path)

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: public(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [public(inner) for inner in value]
        return public_name(value) if isinstance(value, str) and os.sep in value else value

    body = {
        key: public(value) if key in ("from", "donors", "config", "trained", "quantised") else value
        for key, value in manifest.items()
    }
    return signed(body)


def push(folder: str | Path, hub_id: str, *, private: bool = False) -> str:
    """Create the repository if needed, upload the folder in one commit, and return the commit's address."""
    check_id(hub_id)
    return send(upload(folder), hub_id, private=private)


def send(what: Upload, hub_id: str, *, private: bool = False) -> str:
    """Upload the files that `upload` chose, and return the commit's address."""
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd

    api = huggingface_hub.HfApi()
    operations = [CommitOperationAdd(name, content) for name, content in what.files]
    try:
        api.create_repo(hub_id, private=private, exist_ok=True)
        done = api.create_commit(hub_id, operations, commit_message="Upload a model made by upcycle")
    except Exception as error:  # the calls may raise errors of three libraries
        reason = first_line(error)
        raise ValueError(f"{what.folder} cannot be uploaded to {hub_id}: {reason}; is `hf auth login` done?") from error
    return str(done.commit_url)


def check_id(hub_id: str) -> None:
    found = HUB_ID.fullmatch(hub_id)
    if not found or found[2]:
        raise ValueError(f"{hub_id!r} is not a Hub name; write it as org/name")
