"""What to attack and how: attacks by name, settings from key=value, sources from files.

M models, N samples. A source is one score matrix: a (mix, arm) of a run of ours, or what
`attacks.interop` finds in other people's files.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from attacks import interop
from attacks.population import Population
from attacks.types import Bools, Ints, ScoreMatrix
from engine.analysis.measures import diverged, sample_groups
from engine.store import open_run
from engine.study import unknown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `--set` may say; each attack takes what it uses."""

    variance: str = "pooled"
    centre: str = "mean"
    shrinkage: float = 8.0
    gamma: float = 2.0
    a: float | Literal["tuned"] = 0.3
    references: int = 0
    alpha: float = 0.05
    regressor: str = "boosting"
    seed: int = 0
    fpr: tuple[float, ...] = (0.001, 0.01)
    level: float = 0.95
    layout: str = "auto"
    design: str = "auto"
    query_mode: str = ""


_LIRA, _RMIA = ("variance", "centre", "shrinkage"), ("gamma", "references")
USES: Mapping[str, tuple[str, ...]] = {
    "loss": (),
    "calibrated": (),
    "attack_p": (),
    "attack_r": (),
    "lira_online": _LIRA,
    "lira_offline": _LIRA,
    "rmia_online": _RMIA,
    "rmia_offline": (*_RMIA, "a"),
    "quantile": ("alpha", "regressor", "seed"),
}
"""The attacks by name, and the settings of their own."""
_COMMON = ("fpr", "level", "layout", "design", "query_mode")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One score matrix to attack; models: those that count (others diverged)."""

    name: str
    matrix: ScoreMatrix
    numbers_M: Ints
    models: Ints
    groups: Mapping[str, Bools]
    population: Population | None
    query_mode: str


def names(given: Sequence[str]) -> list[str]:
    """Attacks by name, each once. Raises ValueError for one that does not exist."""
    chosen = [part.strip() for name in given for part in name.split(",") if part.strip()]
    if not chosen:
        raise ValueError(f"name an attack: known are {', '.join(USES)}")
    for name in chosen:
        if name not in USES:
            raise ValueError(unknown("attack", name, tuple(USES)))
    return list(dict.fromkeys(chosen))


def settings(texts: Sequence[str], attacks: Sequence[str]) -> Settings:
    """Settings from "key=value" texts; a key that no attack here uses is an error."""
    used = {*_COMMON, *(key for name in attacks for key in USES[name])}
    known = {field.name: field for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: expected key=value")
        if key not in known:
            raise ValueError(unknown("setting", key, tuple(known)))
        if key not in used:
            raise ValueError(f"--set {key} is used by none of {', '.join(attacks)}: leave it out")
        given[key] = _parsed(key, value, known[key].default)
    return Settings(**given)


def _parsed(key: str, text: str, default: Any) -> object:
    try:
        if key == "a" and text == "tuned":
            return text
        if isinstance(default, tuple):
            return tuple(float(part) for part in text.split(","))
        return type(default)(text)
    except ValueError:
        raise ValueError(f"--set {key}={text}: expected a value like {default}") from None


def sources(path: Path, settings: Settings, cells: Sequence[str]) -> list[Source]:
    """The score matrices of a path, all or those named. Raises ValueError for what is not there."""
    ours = (path / "manifest.json").is_file() and (path / "study.toml").is_file()
    if ours and settings.layout == "auto":
        return _run_sources(path, cells)
    groups = interop.groups(path, settings.layout)
    found = []
    for group in _chosen(groups, cells, path):
        loaded = interop.read(path, settings.layout, group)
        matrix = dataclasses.replace(loaded.matrix, design=cast(Any, settings.design))
        found.append(
            Source(
                name=group or path.stem,
                matrix=matrix,
                numbers_M=loaded.numbers_M,
                models=np.arange(matrix.models, dtype=np.int64),
                groups={"all": np.ones(matrix.samples, dtype=bool)},
                population=loaded.population,
                query_mode=settings.query_mode or "unknown",
            )
        )
    return found


def _run_sources(path: Path, cells: Sequence[str]) -> list[Source]:
    run = open_run(path)
    names = [f"{mix}/{arm}" for mix in run.study.mixes for arm in run.study.arms]
    found = []
    for name in _chosen(names, cells, path):
        mix, arm = name.split("/")
        cell = run.load(mix, arm)
        matrix = ScoreMatrix(
            scores_MNQ=cell.arrays["phi_NQ"],
            keep_MN=cell.keep_MN,
            design=run.study.membership.design,
        )
        z = cell.arrays["population_phi_ZQ"]
        found.append(
            Source(
                name=name,
                matrix=matrix,
                numbers_M=np.arange(matrix.models, dtype=np.int64),
                models=np.flatnonzero(~diverged(cell)),
                groups=sample_groups(cell.samples.kind_N),
                population=Population(scores_MZQ=z) if z.shape[1] else None,
                query_mode=run.study.query.mode,
            )
        )
    return found


def _chosen(there: Sequence[str], wanted: Sequence[str], path: Path) -> Sequence[str]:
    for name in wanted:
        if name not in there:
            raise ValueError(f"{path} holds no '{name}': there are {', '.join(there)}")
    return list(wanted) or list(there)


def targets(source: Source, text: str) -> Ints:
    """Rows of the targets among the models that count: "all", "last" or numbers with commas."""
    if text == "all":
        return source.models
    if text == "last":
        return source.models[-1:]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--targets {text}: expected all, last, or numbers like 0,3") from None
    row_of = {int(number): m for m, number in enumerate(source.numbers_M)}
    for number in numbers:
        if number not in row_of:
            raise ValueError(
                f"--targets: there is no model {number} in {source.name}, numbers run from "
                f"{source.numbers_M.min()} to {source.numbers_M.max()}"
            )
        if row_of[number] not in source.models:
            raise ValueError(f"--targets: model {number} of {source.name} diverged")
    return np.array([row_of[number] for number in numbers], dtype=np.int64)
