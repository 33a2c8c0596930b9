"""What `engine attack` does: any attack on a run of ours or on other people's scores.

`settings` and `sources` say what to attack and how, `functions` calls the attacks, `rows` and
`means` tabulate, `figures` and `page` draw, `output` writes. M models, N samples, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from attacks.exclusion import plan_exclusion
from attacks.types import AttackScores
from engine.attack import groups as grouping
from engine.attack import settings as asked
from engine.attack import sources as where
from engine.attack.functions import function, needs_population, population_of
from engine.attack.means import Mean, means
from engine.attack.output import prepare, write
from engine.attack.result import Result
from engine.attack.rows import Row, model_counts, rows
from engine.attack.sources import Source

__all__ = ["Attacked", "Mean", "attack"]


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """Rows for a table, one a target and group; their means; the files written."""

    rows: Sequence[Row]
    means: Sequence[Mean]
    written: Sequence[Path]


def attack(
    path: str | Path,
    names: Sequence[str],
    *,
    settings: Sequence[str] = (),
    targets: str = "all",
    cells: Sequence[str] = (),
    groups: str = "kind",
    out: str | Path | None = None,
) -> Attacked:
    """Attack the models of a run directory, or of a folder or .npz in any known layout.

    Args:
        path: a run, or what `attacks.interop` reads.
        names: attacks by name (see `settings.USES`); commas may join them.
        settings: "key=value" for the fields of `settings.Settings`.
        targets: "all", "last", or the targets' numbers joined by commas. Models left out as
            targets still serve as shadow models.
        cells: which MIX/ARM of several (all by default).
        groups: groups of samples for which rows are made beside all: "kind", "class", "decile".
        out: a new folder for attacks.parquet, means.json, attacks.html, figures/*.svg and
            scores.npz (keys NAME/scores_TN, NAME/membership_TN and NAME/excluded_TN, under
            MIX/ARM/ where there are several); None writes nothing.

    Raises:
        ValueError: one sentence that says what would work.
        RuntimeError: a package that writing needs is not installed.
    """
    chosen = asked.names(names)
    values = asked.settings(settings, chosen)
    wanted_groups = grouping.by(groups)
    sources = where.sources(Path(path), values, cells)
    for source in sources:
        for name in filter(needs_population, chosen):
            population_of(source, name)
        where.targets(source, targets)
        grouping.check(source, wanted_groups)
    if out is not None:
        prepare(Path(out))
    parts = [_attack_one(source, chosen, values, targets, wanted_groups) for source in sources]
    found_rows = [row for part in parts for row in part.rows]
    found_means = [mean for part in parts for mean in part.means]
    written: Sequence[Path] = ()
    if out is not None:
        result = Result(
            path=Path(path),
            sources=sources,
            attacks=chosen,
            settings=values,
            designs={source.name: part.design for source, part in zip(sources, parts, strict=True)},
            rows=found_rows,
            means=found_means,
            arrays=_arrays(sources, parts),
        )
        written = write(Path(out), result)
    return Attacked(rows=found_rows, means=found_means, written=written)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What came of one score matrix; attacked: by attack."""

    design: str
    rows: list[Row]
    means: list[Mean]
    attacked: dict[str, AttackScores]


def _attack_one(
    source: Source,
    names: Sequence[str],
    settings: asked.Settings,
    targets: str,
    wanted_groups: Sequence[str],
) -> _Part:
    matrix = source.matrix
    plan = plan_exclusion(matrix.keep_MN, matrix.design, matrix.scores_MNQ)
    wanted = where.targets(source, targets)
    masks = grouping.groups(source, wanted_groups, plan, wanted)
    counts = model_counts(source, plan, wanted, masks)
    drawn = tuple(name for name in masks if name in ("all", *grouping.kinds(source)))
    part = _Part(design=plan.design, rows=[], means=[], attacked={})
    for name in names:
        attacked = function(name)(source, settings, wanted, plan)
        part.rows.extend(rows(source, name, settings, attacked, plan, masks, counts))
        part.means.extend(means(source, name, settings, attacked, masks, drawn))
        part.attacked[name] = attacked
    return part


def _arrays(sources: Sequence[Source], parts: Sequence[_Part]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of scores.npz by key, the matrix's name first where there are several."""
    found = {}
    for source, part in zip(sources, parts, strict=True):
        for name, attacked in part.attacked.items():
            prefix = f"{source.name}/{name}" if len(sources) > 1 else name
            for field in ("scores_TN", "membership_TN", "excluded_TN"):
                found[f"{prefix}/{field}"] = getattr(attacked, field)
    return found
