"""Studies as TOML: find, read, override, check key by key, write back."""

import dataclasses
import importlib.resources
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.study import Study, unknown


def studies_folder() -> Path:
    """The shipped studies: package data in a wheel, the neighbouring folder in a checkout."""
    packaged = Path(str(importlib.resources.files("engine"))) / "configs" / "studies"
    checkout = Path(__file__).resolve().parent.parent / "configs" / "studies"
    return packaged if packaged.is_dir() else checkout


def shipped_studies() -> dict[str, Path]:
    """Name -> file of every shipped study, sorted by name."""
    return {path.stem: path for path in sorted(studies_folder().glob("*.toml"))}


ASKED = ("data", "mixes", "arms", "train", "membership", "query")
"""Tables that say what is asked; the others say how much of it, and how it is computed."""
HANDLING = ("data.loader", "data.spread", "data.cache")
"""Keys of theirs that only say how."""


def load_study(name_or_file: str, overrides: Sequence[str] = ()) -> Study:
    """Read a study by shipped name or file, apply `key=value` overrides, check every key.

    Raises:
        ValueError: one sentence that says what was given and what is valid.
    """
    shipped = shipped_studies()
    path = shipped.get(name_or_file, Path(name_or_file))
    if not path.is_file():
        if path.suffix == ".toml" or "/" in name_or_file:
            raise ValueError(f"no study file at '{name_or_file}': name a .toml file or a study")
        raise ValueError(unknown("study", name_or_file, shipped))
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' is not valid TOML: {error}") from None
    raw.setdefault("name", path.stem.replace(".", "_"))
    for override in overrides:
        _override(raw, override)
    _retell(raw, overrides)
    study: Study = _build(Study, raw, "")
    _check_name(study.name, "name")
    return study


def to_toml(study: Study) -> str:
    """The resolved study as TOML; running it again repeats the run."""
    import tomli_w

    return tomli_w.dumps(_plain(study))


def summary_lines(study: Study) -> list[str]:
    """The resolved study, a line for each table, for people to read before it runs."""
    tables = _plain(study)
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    shown = {key: plain[key] for key in ("models", "seed")}
    lines = [_line("study", shown)]
    for key, table in tables.items():
        if not isinstance(table, dict):
            continue
        if any(isinstance(part, dict) for part in table.values()):
            lines += [_line(f"{key}.{name}", part) for name, part in table.items()]
        else:
            lines.append(_line(key, table))
    return lines


def _line(name: str, table: Mapping[str, object]) -> str:
    parts = []
    for key, value in table.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{k} = {v}" for k, v in value.items())
            parts.append(f"{key} = {{ {inner} }}")
        elif value != "":
            parts.append(f"{key} = {value}")
    return f"{name}: {', '.join(parts)}"


def _override(raw: dict[str, Any], text: str) -> None:
    dotted, equals, value = text.partition("=")
    if not equals or not dotted.strip():
        raise ValueError(f"--set '{text}': expected key=value, for example train.epochs=3")
    *parents, last = dotted.strip().split(".")
    table = raw
    for depth, parent in enumerate(parents):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set '{text}': '{'.'.join(parents[: depth + 1])}' is no table")
    table[last] = _value(value.strip())


def _retell(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Add to the file's question what was changed of what it asks; its cost and expectation go."""
    keys = [text.partition("=")[0].strip() for text in overrides]
    asked = [k for k in keys if k.partition(".")[0] in ASKED and k not in ("data.path", *HANDLING)]
    changed = ", ".join(text for key, text in zip(keys, overrides, strict=True) if key in asked)
    if not changed:
        return
    if "question" not in keys and isinstance(raw.get("question"), str):
        raw["question"] = f"{raw['question']} (with {changed})"
    for told in ("cost", "expected"):
        if told not in keys:
            raw.pop(told, None)


def _value(text: str) -> object:
    """A TOML value, or the bare text where it is none (names and paths need no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _plain(value: object) -> Any:
    """Dataclasses to tables: trailing underscores and Nones dropped."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name.rstrip("_"), getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(part) for name, part in pairs if part is not None}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _build(cls: type, raw: object, where: str) -> Any:
    """A frozen dataclass from a table, every key known and of the right type."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"'{where}' is {raw!r}: expected a table of {_keys(cls)}")
    hints = get_type_hints(cls)
    fields = {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise ValueError(unknown("key", _join(where, key), _joined(where, fields)))
    required = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        key
        for key, f in fields.items()
        if key not in raw and (f.default, f.default_factory) == required
    ]
    if missing:
        raise ValueError(f"{_named(where)} lacks the key '{missing[0]}' (its keys: {_keys(cls)})")
    values = {
        field.name: _convert(hints[field.name], raw[key], _join(where, key))
        for key, field in fields.items()
        if key in raw
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{error} (in [{where}])" if where else str(error)) from None


def _convert(hint: Any, raw: object, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, raw, where)
    if origin is Literal:
        if raw not in arguments:
            raise ValueError(unknown(f"value of {where}", str(raw), tuple(map(str, arguments))))
        return raw
    if origin in (types.UnionType, typing.Union):
        return _one_of([a for a in arguments if a is not types.NoneType], raw, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, Mapping):
            raise ValueError(f"'{where}' is {raw!r}: expected a table of tables")
        for name in raw:
            _check_name(name, where)
        return {
            name: _convert(arguments[1], part, _join(where, name)) for name, part in raw.items()
        }
    if origin is tuple:
        if not isinstance(raw, list | tuple):
            raise ValueError(f"{where} is {raw!r}: expected a list")
        return tuple(_convert(arguments[0], part, where) for part in raw)
    return _scalar(hint, raw, where)


def _one_of(hints: list[Any], raw: object, where: str) -> Any:
    if len(hints) == 1:
        return _convert(hints[0], raw, where)
    for hint in hints:
        try:
            return _convert(hint, raw, where)
        except ValueError:
            continue
    named = " or ".join(str(get_args(h)[0]) if get_args(h) else h.__name__ for h in hints)
    raise ValueError(f"{where} is {raw!r}: expected {named}")


def _scalar(hint: type, raw: object, where: str) -> Any:
    number = isinstance(raw, int) and not isinstance(raw, bool)
    if hint is float and (number or isinstance(raw, float)):
        value = float(typing.cast(float, raw))
        if math.isfinite(value):
            return value
        raise ValueError(f"{where} is {raw!r}: expected a finite number")
    if type(raw) is hint:
        return raw
    raise ValueError(f"{where} is {raw!r}: expected {hint.__name__}")


def _check_name(name: str, where: str) -> None:
    if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
        raise ValueError(
            f"'{name}' in {where}: use letters, digits, '-' and '_' (it names a folder)"
        )


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _joined(where: str, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(_join(where, key) for key in keys)


def _named(where: str) -> str:
    return f"[{where}]" if where else "the study"


def _keys(cls: type) -> str:
    return ", ".join(field.name.rstrip("_") for field in dataclasses.fields(cls))
