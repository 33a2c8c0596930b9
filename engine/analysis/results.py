"""The findings as files for other programs: attacks.parquet and claims.json, each whole or absent.

attacks.parquet has a row for every mix, arm, attack mode, target and group of samples.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine import files
from engine.analysis.cells import Analysed, exclusion_plan
from engine.analysis.findings import ClaimRow, Estimate, Findings, Measure
from engine.analysis.measures import sample_groups
from engine.analysis.scoring import CellScores, GroupScores, shadow_counts
from engine.store import Cell, Run
from engine.study import Study

Row = dict[str, Any]


def target_rows(study: Study, mix: str, arm: str, cell: Cell, found: Analysed) -> list[Row]:
    """The rows of one cell: every mode, target and group; none where the attack was refused."""
    rows: list[Row] = []
    plan = exclusion_plan(study, cell)
    for group, chosen_N in sample_groups(cell.samples.kind_N).items():
        counts = shadow_counts(plan, found.models, chosen_N)
        for scores in found.scores.values():
            for position, target in enumerate([] if scores.refused else scores.targets_T):
                row = {
                    "mix": mix,
                    "arm": arm,
                    "attack": "lira",
                    "mode": scores.mode,
                    "target": int(target),
                    "group": group,
                    "statistic": "logit_scaled_confidence",
                    "variance": study.attacks.variance,
                    "query_mode": study.query.mode,
                    "models": len(found.models),
                    "samples": int(chosen_N.sum()),
                }
                rows.append(row | _outcome(study, scores, group, position, counts))
    return rows


def _outcome(
    study: Study, scores: CellScores, group: str, position: int, counts: Mapping[str, Any]
) -> Row:
    found: GroupScores = scores.groups[group]
    row: Row = {
        "excluded": int(found.excluded_T[position]),
        "members": int(found.members_T[position]),
        "non_members": int(found.non_members_T[position]),
        "auc": _known(found.auc_T[position]),
    }
    for side, rows_T3 in counts.items():
        for what, count in zip(("min", "median", "max"), rows_T3[position], strict=True):
            row[f"{side}_models_{what}"] = int(count)
    for column, alpha in enumerate(study.attacks.fpr):
        row[f"tpr_at_{alpha:g}"] = _known(found.tpr_TA[position, column])
        row[f"realised_fpr_at_{alpha:g}"] = _known(found.realised_fpr_TA[position, column])
        for bound, side in enumerate(("low", "high")):
            row[f"tpr_bound_{side}_at_{alpha:g}"] = _known(found.bound_TA2[position, column, bound])
    return row


def write(run: Run, findings: Findings, rows: Sequence[Row]) -> None:
    """Write attacks.parquet and claims.json into the run directory."""
    pyarrow, parquet = _pyarrow()
    table = pyarrow.Table.from_pylist(list(rows))
    files.write_atomic(
        run.path / "attacks.parquet", lambda stream: parquet.write_table(table, stream)
    )
    claims = {
        "study": findings.name,
        "digest": findings.digest,
        "answer": findings.answer,
        "headline": findings.headline,
        "level": findings.level,
        "claims": [_claim(row) for row in findings.claims],
    }
    text = json.dumps(claims, indent=2, ensure_ascii=False, allow_nan=False)
    files.write_text(run.path / "claims.json", text + "\n")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise RuntimeError(
            "attacks.parquet needs pyarrow, which is not installed: "
            "pip install 'shadow-engine[report]', then `engine report` on this run"
        ) from None
    return pyarrow, pyarrow.parquet


def _claim(row: ClaimRow) -> Row:
    plain = {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name not in ("measures", "beside", "p_value")
    }
    plain["subject"] = row.subject
    plain["p_value"] = _known(row.p_value)
    plain["measures"] = [_measure(m) for m in row.measures]
    plain["beside"] = [_measure(m) for m in row.beside]
    return plain


def _measure(measure: Measure) -> Row:
    side = "above" if measure.upward else "below"
    claimed = {"claimed": side, "threshold": measure.threshold}
    unit = "epochs" if measure.unit == "epochs" else "fraction"
    return {"what": measure.what, "unit": unit, **claimed, **_estimate(measure.estimate)}


def _estimate(estimate: Estimate) -> Row:
    return {
        "value": _known(estimate.value),
        "low": _known(estimate.interval.low),
        "high": _known(estimate.interval.high),
        "method": estimate.interval.method,
        "reason": estimate.reason,
    }


def _known(value: float) -> float | None:
    """NaN as null."""
    return None if math.isnan(value) else float(np.float64(value))
