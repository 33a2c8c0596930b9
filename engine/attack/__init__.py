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
from engine.attack import groups as grouping
from engine.attack import settings as asked
from engine.attack import sources as where
from engine.attack.functions import function, needs_population, population_of
from engine.attack.means import Mean, means
from engine.attack.output import prepare, write
from engine.attack.result import Result
from engine.attack.rows import Row, model_counts, rows

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
    designs: dict[str, str] = {}
    found_rows: list[Row] = []
    found_means: list[Mean] = []
    arrays: dict[str, npt.NDArray[Any]] = {}
    for source in sources:
        plan = plan_exclusion(source.matrix.keep_MN, source.matrix.design, source.matrix.scores_MNQ)
        designs[source.name] = plan.design
        wanted = where.targets(source, targets)
        masks = grouping.groups(source, wanted_groups, plan, wanted)
        counts = model_counts(source, plan, wanted, masks)
        drawn = tuple(name for name in masks if name in ("all", *grouping.kinds(source)))
        for name in chosen:
            attacked = function(name)(source, values, wanted, plan)
            found_rows += rows(source, name, values, attacked, plan, masks, counts)
            found_means += means(source, name, values, attacked, masks, drawn)
            prefix = f"{source.name}/{name}" if len(sources) > 1 else name
            for field in ("scores_TN", "membership_TN", "excluded_TN"):
                arrays[f"{prefix}/{field}"] = getattr(attacked, field)
    written: Sequence[Path] = ()
    if out is not None:
        result = Result(
            path=Path(path),
            sources=sources,
            attacks=chosen,
            settings=values,
            designs=designs,
            rows=found_rows,
            means=found_means,
            arrays=arrays,
        )
        written = write(Path(out), result)
    return Attacked(rows=found_rows, means=found_means, written=written)
