"""Read a config dataclass from a YAML file and key=value words; an unknown key names the nearest key."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from upcycle.config.ready import UPCYCLE
from upcycle.config.schema import renamed
from upcycle.io import publish, strict
from upcycle.io.checkpoint import HUB_ID
from upcycle.plugin import nearest

T = TypeVar("T")
# exceptions that escape OmegaConf: for a list instead of a mapping, for `[=1`, for a list that holds itself
NONSENSE = (TypeError, IndexError, RecursionError, json.JSONDecodeError)
OTHER_KEY = re.compile(r"\$\{[\w.\[\]-]+\}")  # ${a.b}, the only reference that a file may use
WANTED = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}  # OmegaConf's types, in words
FLOAT = 10**300  # OmegaConf converts every larger whole number with an OverflowError
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read(
    kind: type[T],
    file: str,
    words: Sequence[str] = (),
    ready: Path = UPCYCLE,
    values: Iterable[tuple[str, Any]] = (),
) -> T:
    """Read a `kind` from an optional YAML file (a path or a ready config's name), `a.b=value` words and `values`.

    Later ones win, and every mistake is a ValueError of one sentence. ${a.b} in a YAML file or a word is the value of
    another key. Only words may reach further, as ${oc.env:HOME} does. JSON and `values` are literal.
    """
    try:
        merged = OmegaConf.create(loaded(file, ready) if file else {})
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise ValueError(f"{word!r} is not key=value; write for instance top_k=2")
            OmegaConf.update(merged, key, word_value(kind, key, value), merge=True)
        for key, given in values:
            OmegaConf.update(merged, key, literal(given), merge=True)
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, UnicodeError, *NONSENSE) as error:
        raise ValueError(f"the config cannot be read: {' '.join(str(error).split())}") from None
    return build(kind, at_home(plain))


def at_home(value: Any) -> Any:
    """Replace ~/ at the start of a text, as a shell does; shells do not do it inside [...], and not all after =."""
    if isinstance(value, Mapping):
        return {key: at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [at_home(inner) for inner in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def config_of(
    kind: type[T], config: str | PathLike[str] | Mapping[str, Any] | T, keys: Mapping[str, Any], ready: Path = UPCYCLE
) -> T:
    """Read a `kind` from a YAML file, a ready config's name, keys and values, or a `kind`, changed by `keys`."""
    file = fspath(config) if isinstance(config, str | PathLike) else ""
    values = dataclasses.asdict(cast(Any, config)) if dataclasses.is_dataclass(config) else config
    given = values.items() if isinstance(values, Mapping) else ()
    return read(kind, file, ready=ready, values=[*given, *keys.items()])


def read_own(kind: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """Read a command's own keys and return them with the words that are left for its config."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    own = [word for word in words if "=" in word and word.partition("=")[0] in names]
    return read(kind, "", own), [word for word in words if word not in own]


def config_and_source(words: Sequence[str], ready: Path = UPCYCLE) -> tuple[str, list[str]]:
    """Split `[CONFIG] [SOURCE] key=value ...` into the config's file and the words, SOURCE as `source=SOURCE`."""
    files, sources, keys = list[str](), list[str](), [word for word in words if "=" in word]
    known = sorted(path.stem for path in ready.glob("*.yaml"))
    for name in (word for word in words if "=" not in word):
        if Path(name).is_file() or name in known or name.endswith((".yaml", ".yml", ".json")):
            files.append(name)
        elif Path(name).is_dir() or HUB_ID.fullmatch(name):
            sources.append(f"source={name}")
        else:
            here = Path(name).parent
            folders = [str(path) for path in here.iterdir() if path.is_dir()] if here.is_dir() else []
            make = f"; a folder to make is written output={name}" if "source=" in " ".join([*sources, *keys]) else ""
            raise ValueError(
                f"{name!r} is not a config, a folder here or org/name{nearest(str(Path(name)), [*known, *folders])}; "
                f"ready configs are {', '.join(known)}{make}"
            )
    both = [*sources, *(word for word in keys if word.startswith("source="))]
    if len(files) > 1 or len(both) > 1:
        twice = files if len(files) > 1 else both
        raise ValueError(f"{' and '.join(twice)}: only one can be read; write the folder to make as output=FOLDER")
    return (files[0] if files else ""), [*sources, *keys]


def loaded(file: str, ready: Path) -> dict[str, Any]:
    """Return the keys and values of a config file, with only ${a.b} left to resolve."""
    path = find(file, ready)
    by_program = path.suffix == ".json"  # a folder's upcycle.json or a run's run.json
    found = strict.read_json(path) if by_program else strict.read_yaml(path)
    if by_program and isinstance(found, dict) and "sum" in found:
        found = publish.unsigned(found, path, "remove its key sum if you changed it on purpose")
    found = literal(found) if by_program else found
    if isinstance(found, dict) and {"plan", "promise", "config", "method"} <= found.keys():
        found = of_manifest(found)
    elif by_program and isinstance(found, dict) and {"format", "trained"} <= found.keys():
        raise ValueError(
            f"{file} is the record of a trained model, not a plan; plan its run's model.upcycle keys, or read "
            f"the folder with upcycle inspect {path.parent}"
        )
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else "plain text" if found else "nothing"
        raise ValueError(f"{file} holds {kind}, not keys and values; write lines such as experts: 8")
    if not by_program:
        check_reach(found, file)
    return found


def keys_of(file: str, ready: Path) -> dict[str, Any]:
    """Return the keys and values of a config file, resolved."""
    found: Any = OmegaConf.to_container(OmegaConf.create(loaded(file, ready)), resolve=True)
    return cast(dict[str, Any], found)


def check_reach(value: Any, file: str) -> None:
    """Raise a ValueError for a reference to anything except another key, such as an environment variable: the file may
    be a stranger's, and its values end in folders and pages that users publish."""
    if isinstance(value, str) and "${" in OTHER_KEY.sub("", value):
        raise ValueError(
            f"{file} has {value!r}, but a file may only refer to another key, as in ${{source}}; to read the "
            "environment, type a word: KEY='${oc.env:NAME}'"
        )
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        check_reach(inner, file)


def literal(value: Any) -> Any:
    """Escape a value so that OmegaConf keeps ${...} in its texts."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, Mapping):
        return {key: literal(inner) for key, inner in value.items()}
    return [literal(inner) for inner in value] if isinstance(value, list | tuple) else value


def of_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a converted folder's upcycle.json, which gives the same plan with the same hash."""
    return {**renamed(manifest["config"]), "method": manifest["method"]}


def word_value(kind: type[Any], key: str, text: str) -> Any:
    """Return the value of a word, read as YAML. Text for a str field stays as typed: output=0123 is not a number."""
    *path, last = key.split(".")
    for name in path:
        kind = get_type_hints(kind).get(name, object) if dataclasses.is_dataclass(kind) else object
    value = strict.parse_yaml(text, key) if text else ""
    is_name = dataclasses.is_dataclass(kind) and get_type_hints(kind).get(last) is str
    return text if is_name and not isinstance(value, str) else value


def find(file: str, ready: Path, what: str = "config", maker: str = "") -> Path:
    """Return the path of a YAML file, or of a ready one by its name; `maker`: the command that writes such a file."""
    for path in (Path(file), ready / f"{file}.yaml"):
        if path.is_file():
            return path
    known = sorted(p.stem for p in ready.glob("*.yaml"))
    if Path(file).is_dir():
        raise ValueError(
            f"{file} is a folder, but a {what} is a YAML file or one of {', '.join(known)}; a model's folder goes "
            f"into a key: source={file} of plan and convert, model.source={file} of train and estimate, "
            f"architecture={file}/config.json of bench"
        )
    raise ValueError(
        f"there is no {what} {file!r}: give a YAML file{maker and f' (that {maker} writes)'} or one of "
        f"{', '.join(known) or 'none here'}{nearest(file, known)}"
    )


def build(kind: type[T], values: Any, where: str = "") -> T:
    """Build a dataclass from plain values. Unknown keys are errors that name the nearest key, and OmegaConf checks
    types. Texts are literal: only `read` resolves ${...}."""
    if not isinstance(values, Mapping):
        example = f", for instance {where}{dataclasses.fields(kind)[0].name}=VALUE" if where else ""  # type: ignore[arg-type]
        raise ValueError(
            f"{where.rstrip('.') or 'the config'} is {strict.short(values)}; it must be keys and values{example}"
        )
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            meant = elsewhere(kind, str(key), where) or nearest(str(key), list(fields))
            raise ValueError(f"unknown key '{where}{key!s:.160}'{meant}; known keys: {', '.join(fields)}")
    schema: DictConfig = OmegaConf.structured(kind)
    OmegaConf.set_readonly(schema, False)
    try:
        for key, value in values.items():
            if value == "auto" and key in getattr(kind, "AUTO", ()):
                values = {**values, key: 0}
                continue
            if isinstance(value, int) and abs(value) > FLOAT:
                raise ValueError(f"{where}{key} has over 300 digits; write a number that a float can hold")
            default = getattr(schema, key)
            if isinstance(default, DictConfig) and OmegaConf.get_type(default) is not dict:
                inner = build(cast(type[Any], OmegaConf.get_type(default)), value, f"{where}{key}.")
                values = {**values, key: dataclasses.asdict(inner)}
            elif isinstance(value, list) and isinstance(default, DictConfig):
                raise ValueError(f"{where}{key} is {strict.short(value)}; it must be keys and values")
            elif isinstance(value, Mapping) and isinstance(fields[key].default, tuple):
                raise ValueError(f"{where}{key} is {strict.short(value)}; it must be a list, as in {where}{key}=[...]")
            elif (
                isinstance(value, list)
                and "tuple[str" in str(fields[key].type)
                and (nested := [item for item in value if isinstance(item, list | Mapping)])
            ):
                raise ValueError(f"{where}{key} has {strict.short(nested[0])}; its items must be plain text")
            elif isinstance(value, str) and isinstance(fields[key].default, tuple):
                values = {**values, key: [value]}  # a single value needs no brackets
        return OmegaConf.to_object(OmegaConf.merge(schema, literal(values)))  # type: ignore[return-value]
    except (OmegaConfBaseException, *NONSENSE) as error:
        raise ValueError(mistyped(str(error), fields, where)) from None


def mistyped(said: str, fields: Mapping[str, dataclasses.Field[Any]], where: str) -> str:
    """Rewrite OmegaConf's message about a value of the wrong type in a user's words, with type and default."""
    first = said.splitlines()[0]
    full = re.search(r"full_key: (\S+)", said)
    place = f"{where}{full[1] if full else ''}"
    found = re.search(r"Value (.*?)(?: of type '\w+')? (?:could not be converted to|is not a valid) (\w+)", first)
    if not found or found[2] not in WANTED:
        return f"{place}: {first}".lstrip(": ")
    default = fields[full[1]].default if full and full[1] in fields else None
    known = isinstance(default, int | float) and not isinstance(default, bool)
    example = f", for instance {place}={default:g}" if known else ""
    return f"{place} is {found[1]}; it must be {WANTED[found[2]]}{example}"


def elsewhere(kind: type[Any], key: str, where: str = "") -> str:
    """Return '; write X' if the config's ELSEWHERE or one of its parts knows the key as X, else ''."""
    place = getattr(kind, "ELSEWHERE", {}).get(key)
    places = [place] if place else [f"{where}{path}" for path in paths(kind, key)]
    return f"; write {' or '.join(places)}" if 0 < len(places) < 4 else ""


def paths(kind: type[Any], key: str) -> list[str]:
    """Return the paths of fields with this name in a config's parts, as in router.score."""
    parts = {name: part for name, part in get_type_hints(kind).items() if dataclasses.is_dataclass(part)}
    own = [f"{name}.{key}" for name, part in parts.items() if key in part.__dataclass_fields__]
    return own + [f"{name}.{path}" for name, part in parts.items() for path in paths(cast(type[Any], part), key)]


def byte_size(text: str) -> int:
    """Convert a size to bytes: '5GB' -> 5_000_000_000."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?B)\s*", str(text).upper())
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write for instance 5GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2]])
