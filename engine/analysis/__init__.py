"""From a finished run to its findings: attack every cell, compare arms, judge claims.

One cell is in memory at a time. A model that diverged in an arm is left out of that arm, and of
both arms of a contrast, and counted.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.analysis import results, wording
from engine.analysis.cells import Analysed, analyse_cell, cell_findings
from engine.analysis.claims import judge
from engine.analysis.contrasts import contrast
from engine.analysis.findings import CellFindings, Contrast, Findings, MixFacts
from engine.analysis.measures import diverged, sample_groups
from engine.outliers import CLEAN
from engine.store import Run


def analyse(run: Run, told: Callable[[str], object] = lambda cell: None) -> Findings:
    """Attack a finished run and write attacks.parquet and claims.json beside its report.

    told: called with "MIX/ARM" before each cell is attacked.

    Raises:
        ValueError: models are missing or their shards are damaged.
    """
    study = run.study
    cells: list[CellFindings] = []
    contrasts: list[Contrast] = []
    rows: list[results.Row] = []
    for mix in study.mixes:
        analysed: dict[tuple[str, str], Analysed] = {}
        for arm in study.arms:
            told(f"{mix}/{arm}")
            cell = run.load(mix, arm)
            broken_M = diverged(cell)
            found = analyse_cell(study, cell, np.flatnonzero(~broken_M), wording.all_diverged(arm))
            analysed[mix, arm] = found
            cells.append(cell_findings(study, mix, arm, cell, broken_M, found))
            rows += results.target_rows(study, mix, arm, cell, found)
        groups = tuple(sample_groups(run.membership(mix)[1].kind_N))
        contrasts += [contrast(run, mix, arms, analysed, groups) for arms in study.contrasts()]
    findings = _findings(run, tuple(cells), tuple(contrasts))
    results.write(run, findings, rows)
    return findings


def _findings(
    run: Run,
    cells: tuple[CellFindings, ...],
    contrasts: tuple[Contrast, ...],
) -> Findings:
    study = run.study
    mixes = tuple(_mix_facts(run, mix) for mix in study.mixes)
    findings = Findings(
        name=study.name,
        question=study.question,
        digest=run.digest,
        arms=tuple(study.arms),
        epochs=study.train.epochs,
        models=study.models,
        level=study.attacks.level,
        variance=study.attacks.variance,
        query_mode=study.query.mode,
        design=study.membership.design,
        alphas=study.attacks.fpr,
        mixes=mixes,
        cells=cells,
        contrasts=contrasts,
        claims=judge(study, mixes, cells, contrasts),
        headline="",
        answer="",
        study=study,
        manifest=run.manifest,
    )
    return replace(
        findings,
        answer=wording.answer(findings),
        headline=wording.headline(findings),
    )


def _mix_facts(run: Run, mix: str) -> MixFacts:
    _, samples = run.membership(mix)
    outliers = int((samples.kind_N != CLEAN).sum())
    chosen = run.study.mixes[mix]
    return MixFacts(
        name=mix,
        kind=chosen.kind,
        share=chosen.share,
        samples=len(samples.kind_N),
        outliers=outliers,
    )
