"""What `engine attack` does: any attack on a run of ours or on other people's scores.

M models, N samples, Q queries, T targets, Z population samples.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from attacks.evaluate import evaluate
from attacks.exclusion import Exclusion, plan_exclusion
from attacks.lira import LiraParameters, lira
from attacks.metrics import auc, balanced_accuracy, tpr_at_fpr
from attacks.population import Population
from attacks.quantile import QuantileParameters, quantile
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_p, attack_r, calibrated, loss
from attacks.types import AttackScores, Excluded, Interval, Ints, ScoreMatrix
from engine import files
from engine.attack import sources as attack_sources
from engine.analysis.scoring import shadow_counts
from engine.attack.sources import Settings, Source

Row = dict[str, Any]
Function = Callable[[Source, Settings, Ints, Exclusion], AttackScores]

STATISTIC = "logit_scaled_confidence"
MOST_GROUPS = 64


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The mean over targets of one attack on one matrix and group."""

    source: str
    attack: str
    group: str
    targets: int
    auc: float
    interval: Interval
    excluded: int


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """Rows for a table, one a target and group; their means; the files written."""

    rows: Sequence[Row]
    summaries: Sequence[Summary]
    written: Sequence[Path]


def attack(
    path: str | Path,
    names: Sequence[str],
    *,
    settings: Sequence[str] = (),
    targets: str = "all",
    cells: Sequence[str] = (),
    out: str | Path | None = None,
) -> Attacked:
    """Attack the models of a run directory, or of a folder or .npz in any known layout.

    Args:
        path: a run, or what `attacks.interop` reads.
        names: attacks by name (see USES); commas may join them.
        settings: "key=value" for the fields of Settings.
        targets: "all", "last", or the targets' numbers joined by commas. Models left out as
            targets still serve as shadow models.
        cells: which MIX/ARM of several (all by default).
        out: folder for attacks.parquet and scores.npz (keys NAME/scores_TN, NAME/membership_TN and
            NAME/excluded_TN, under MIX/ARM/ where there are several); None writes nothing.

    Raises:
        ValueError: one sentence that says what would work.
    """
    chosen = attack_sources.names(names)
    values = attack_sources.settings(settings, chosen)
    sources = attack_sources.sources(Path(path), values, cells)
    if out is not None:
        _prepare(Path(out))
    rows: list[Row] = []
    summaries: list[Summary] = []
    arrays: dict[str, npt.NDArray[Any]] = {}
    for source in sources:
        plan = plan_exclusion(source.matrix.keep_MN, source.matrix.design, source.matrix.scores_MNQ)
        wanted = attack_sources.targets(source, targets)
        for name in chosen:
            attacked = _function(name)(source, values, wanted, plan)
            rows += _rows(source, name, values, attacked, plan)
            summaries += _summaries(source, name, values, attacked, len(wanted))
            prefix = f"{source.name}/{name}" if len(sources) > 1 else name
            for field in ("scores_TN", "membership_TN", "excluded_TN"):
                arrays[f"{prefix}/{field}"] = getattr(attacked, field)
    written = [] if out is None else _write(Path(out), rows, arrays)
    return Attacked(rows=rows, summaries=summaries, written=written)


def _population(source: Source, name: str) -> Population:
    if source.population is None:
        raise ValueError(
            f"{name} needs scores of samples that no model trained on, and {source.name} has none: "
            "add population_scores_MZQ to the .npz, or use an attack that needs none"
        )
    return source.population


def _function(name: str) -> Function:
    """An attack by name, as a function of a source, its settings, the targets and the rule."""

    def run(source: Source, settings: Settings, targets: Ints, plan: Exclusion) -> AttackScores:
        matrix = source.matrix
        common: dict[str, Any] = {"targets": targets, "models": source.models, "plan": plan}
        if name in ("loss", "calibrated", "attack_r"):
            plain = {"loss": loss, "calibrated": calibrated, "attack_r": attack_r}[name]
            return plain(matrix, **common)
        if name.startswith("lira"):
            parameters = LiraParameters(
                online=name == "lira_online",
                variance=cast(Any, settings.variance),
                centre=cast(Any, settings.centre),
                shrinkage=settings.shrinkage,
            )
            return lira(matrix, parameters, **common)
        population = _population(source, name)
        if name == "attack_p":
            return attack_p(matrix, population, **common)
        if name == "quantile":
            return _quantile(source, population, settings, common)
        online = name == "rmia_online"
        a = 0.3 if online else settings.a
        chosen = RmiaParameters(
            online=online, gamma=settings.gamma, a=a, references=settings.references
        )
        return rmia(matrix, population, chosen, **common)

    return run


def _quantile(
    source: Source, population: Population, settings: Settings, common: dict[str, Any]
) -> AttackScores:
    """Quantile regression on one feature: the mean phi over the models that did not train on it."""
    parameters = QuantileParameters(
        alpha=settings.alpha, regressor=cast(Any, settings.regressor), seed=settings.seed
    )
    against = calibrated(source.matrix, **common)
    own = loss(source.matrix, **common)
    level_TN = own.scores_TN - against.scores_TN
    partner = common["plan"].partner_M
    place = {int(t): i for i, t in enumerate(against.targets_T)}

    def features(target: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        level = level_TN[place[target]]
        known = np.isfinite(level)
        level = np.where(known, level, level[known].mean() if known.any() else 0.0)
        others = [m for m in source.models if m not in (target, partner[target])]
        z = population.scores_MZQ[others].astype(np.float64).mean(axis=2)
        finite = np.isfinite(z)
        mean = np.where(finite, z, 0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
        return level[:, None], mean[:, None]

    result = quantile(source.matrix, population, features, None, parameters, **common)
    unknown_TN = (against.excluded_TN > 0) & (result.excluded_TN == 0)
    result.excluded_TN[unknown_TN] = against.excluded_TN[unknown_TN]
    result.scores_TN[unknown_TN] = np.nan
    return result


def _rows(
    source: Source, name: str, settings: Settings, attacked: AttackScores, plan: Exclusion
) -> list[Row]:
    mix, _, arm = source.name.rpartition("/")
    rows: list[Row] = []
    for group, chosen_N in source.groups.items():
        counts = shadow_counts(plan, source.models, chosen_N)
        position = {int(m): i for i, m in enumerate(source.models)}
        for i, target in enumerate(attacked.targets_T.tolist()):
            scores, membership = (
                attacked.scores_TN[i, chosen_N],
                attacked.membership_TN[i, chosen_N],
            )
            codes = attacked.excluded_TN[i, chosen_N]
            row: Row = {
                "mix": mix,
                "arm": arm,
                "attack": name,
                "target": int(source.numbers_M[target]),
                "group": group,
                "statistic": STATISTIC,
                "variance": settings.variance if name.startswith("lira") else "none",
                "query_mode": source.query_mode,
                "models": len(source.models),
                "queries": source.matrix.queries,
                "samples": int(chosen_N.sum()),
                "excluded": int((codes > 0).sum()),
                "members": int((membership & (codes == 0)).sum()),
                "non_members": int((~membership & (codes == 0)).sum()),
                "auc": _known(auc(scores, membership)),
                "balanced_accuracy": _known(balanced_accuracy(scores, membership)),
            }
            for code in Excluded:
                if code:
                    row[f"excluded_{code.name.lower()}"] = int((codes == code).sum())
            for side, table in counts.items():
                for what, count in zip(
                    ("min", "median", "max"), table[position[target]], strict=True
                ):
                    row[f"{side}_models_{what}"] = int(count)
            for alpha in settings.fpr:
                rate = tpr_at_fpr(scores, membership, alpha)
                row[f"tpr_at_{alpha:g}"] = _known(rate.tpr)
                row[f"realised_fpr_at_{alpha:g}"] = _known(rate.realised_fpr)
                row[f"tpr_at_{alpha:g}_refused"] = rate.refused
            rows.append(row)
    return rows


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _summaries(
    source: Source, name: str, settings: Settings, attacked: AttackScores, targets: int
) -> list[Summary]:
    """Means over targets, with the jackknife's interval where every model was one."""
    function = _function(name)

    def again(matrix: ScoreMatrix, models: Ints, plan: Exclusion) -> AttackScores:
        fewer = dataclasses.replace(source, matrix=matrix, models=models)
        return function(fewer, settings, models, plan)

    everyone = targets == len(source.models)
    slow = name == "quantile" or (name == "rmia_offline" and settings.a == "tuned")
    if everyone:
        result = evaluate(
            source.matrix,
            again,
            source.groups,
            alphas=(),
            models=source.models,
            max_groups=8 if slow else MOST_GROUPS,
        )
    summaries = []
    for group, chosen_N in source.groups.items():
        values = [
            auc(scores[chosen_N], membership[chosen_N])
            for scores, membership in zip(attacked.scores_TN, attacked.membership_TN, strict=True)
        ]
        known = [value for value in values if not math.isnan(value)]
        missing = Interval(
            low=math.nan,
            high=math.nan,
            level=settings.level,
            method="none",
            reason=f"{targets} of {len(source.models)} models were targets: it needs all",
        )
        summaries.append(
            Summary(
                source=source.name,
                attack=name,
                group=group,
                targets=targets,
                auc=float(np.mean(known)) if known else math.nan,
                interval=result.interval(group, "auc", settings.level) if everyone else missing,
                excluded=int((attacked.excluded_TN[:, chosen_N] > 0).sum()),
            )
        )
    return summaries


def _prepare(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    _pyarrow()
    out.mkdir(parents=True, exist_ok=True)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise RuntimeError(
            "attacks.parquet needs pyarrow, which is not installed: "
            "pip install 'shadow-engine[report]'"
        ) from None
    return pyarrow, pyarrow.parquet


def _write(out: Path, rows: Sequence[Row], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Path]:
    pyarrow, parquet = _pyarrow()
    table = pyarrow.Table.from_pylist(list(rows))
    files.write_atomic(out / "attacks.parquet", lambda stream: parquet.write_table(table, stream))
    files.write_atomic(
        out / "scores.npz",
        lambda stream: np.savez(stream, **arrays),  # type: ignore[arg-type]
    )
    return [out / "attacks.parquet", out / "scores.npz"]
