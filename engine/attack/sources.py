"""What to attack: score matrices from a run of ours or from other people's files.

M models, N samples. A source is one score matrix: a (mix, arm) of a run of ours, or what
`attacks.interop` finds in other people's files.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from attacks import interop
from attacks.loaded import brief
from attacks.population import Population
from attacks.types import Bools, Ints, ScoreMatrix
from engine.analysis.measures import diverged
from engine.attack.settings import Settings
from engine.store import open_run


@dataclass(frozen=True, kw_only=True)
class Source:
    """One score matrix to attack; models: those that count (others diverged).

    labels_N (trained on), kind_N (0 clean, 1 flipped, 2 ood) and correct_MN where they are known.
    """

    name: str
    matrix: ScoreMatrix
    numbers_M: Ints
    models: Ints
    population: Population | None = None
    query_mode: str = "unknown"
    labels_N: npt.NDArray[Any] | None = None
    kind_N: npt.NDArray[Any] | None = None
    correct_MN: Bools | None = None

    @property
    def mix(self) -> str:
        """The part of the name before its last slash; "" where there is none."""
        return self.name.rpartition("/")[0]

    @property
    def arm(self) -> str:
        """The part of the name after its last slash."""
        return self.name.rpartition("/")[2]

    @property
    def alive_M(self) -> Bools:
        """Which models count."""
        return np.isin(np.arange(self.matrix.models), self.models)


def sources(path: Path, settings: Settings, cells: Sequence[str]) -> list[Source]:
    """The score matrices of a path, all or those named. Raises ValueError for what is not there."""
    ours = (path / "manifest.json").is_file() and (path / "study.toml").is_file()
    if ours and settings.layout == "auto":
        for key in ("design", "query_mode"):
            if getattr(settings, key) != getattr(Settings(), key):
                raise ValueError(f"--set {key} is for other people's scores: {path} says its own")
        return _run_sources(path, cells)
    groups = interop.groups(path, settings.layout)
    found = []
    for group in _chosen(groups, cells, path):
        loaded = interop.read(path, settings.layout, group)
        matrix = dataclasses.replace(loaded.matrix, design=cast(Any, settings.design))
        if not any(np.isfinite(row).any() for row in matrix.scores_MNQ):
            raise ValueError(f"{group or path} holds no finite score: nothing can be attacked")
        found.append(
            Source(
                name=group or path.resolve().stem,
                matrix=matrix,
                numbers_M=loaded.numbers_M,
                models=np.arange(matrix.models, dtype=np.int64),
                population=loaded.population,
                query_mode=settings.query_mode or "unknown",
                labels_N=loaded.labels_N,
                kind_N=loaded.kind_N,
                correct_MN=loaded.correct_MN,
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
        models = np.flatnonzero(~diverged(cell))
        if not models.size:
            raise ValueError(f"every model of {name} diverged: name other cells after the path")
        found.append(
            Source(
                name=name,
                matrix=matrix,
                numbers_M=np.arange(matrix.models, dtype=np.int64),
                models=models,
                population=Population(scores_MZQ=z) if z.shape[1] else None,
                query_mode=run.study.query.mode,
                labels_N=cell.samples.label_N,
                kind_N=cell.samples.kind_N,
                correct_MN=cell.arrays["correct_N"].astype(bool),
            )
        )
    return found


def _chosen(there: Sequence[str], wanted: Sequence[str], path: Path) -> Sequence[str]:
    for name in wanted:
        if name not in there:
            if list(there) == [""]:
                raise ValueError(f"{path} holds no '{name}': it is one score matrix, name no cell")
            raise ValueError(f"{path} holds no '{name}': there are {', '.join(there)}")
    return list(dict.fromkeys(wanted)) or list(there)


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
                f"--targets: there is no model {number} in {source.name}, models are numbered "
                f"{brief(sorted(row_of))}"
            )
        if row_of[number] not in source.models:
            raise ValueError(f"--targets: model {number} of {source.name} diverged")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--targets {text} names a model twice")
    return np.array([row_of[number] for number in numbers], dtype=np.int64)
