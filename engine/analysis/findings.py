"""What a run found, as frozen records: numbers, each with its interval or the reason for none.

E epochs, L batch-norm layers, G curve groups. Every rate is a share (0 to 1); the report turns
shares into points and per cent. An undefined number is NaN and says why.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attacks.types import Interval
from engine.study import Study

Floats = npt.NDArray[np.float64]

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
RATE: Range = (0.0, 1.0)
"""Of accuracies, AUCs, TPRs and shares."""

GROUPS = ("all", "clean", "outlier")
MOST_GROUPS = 32
"""Groups of models that the attacks' jackknife deletes, at most: beyond, pairs are merged."""
CURVE_GROUPS = ("clean_in", "clean_out", "outlier_in", "outlier_out", "population")
"""The groups of engine.probes' epoch curves, in their order."""

RATES = (
    *(
        f"{group}_{what}"
        for group in GROUPS
        for what in ("in_accuracy", "out_accuracy", "gap", "in_loss", "out_loss")
    ),
    "test_accuracy",
    "test_loss",
    "clean_unfit",
    "outlier_unfit",
    "gamma_share",
)
"""Means over models, accuracy and loss of the label trained on: `*_in_*` on samples the model
trained on, `*_out_*` on those it did not; `*_gap` is IN minus OUT accuracy; `test_*` on the
population; `*_unfit` the number of epochs that a training sample of the probe set stays
misclassified; `gamma_share` the share of batch-norm layers whose median |gamma / sigma| exceeds 1
after the last epoch."""

Verdict = Literal["held", "not held", "not decidable here"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over models with its interval. `undefined` says why `value` is NaN.

    possible: what it can be at all; the symmetric interval may reach beyond.
    """

    value: float
    interval: Interval
    standard_error: float = math.nan
    degrees: int = 0
    undefined: str = ""
    possible: Range = ANY

    @property
    def reason(self) -> str:
        """Why there is no number, or no interval; empty where there are both."""
        return self.undefined or self.interval.reason

    @property
    def ends(self) -> Range:
        """The interval's ends as they are shown: cut to the possible, where the truth must lie."""
        return max(self.interval.low, self.possible[0]), min(self.interval.high, self.possible[1])


@dataclass(frozen=True, kw_only=True)
class RateAt:
    """TPR at a false-positive rate, or, where alpha is below 1 / n_out, why it is refused.

    realised_fpr: mean over targets of the rate at which the TPR was read. bound: a refused TPR lies
    between these, the mean TPRs without and with at most one false positive.
    """

    alpha: float
    tpr: Estimate
    realised_fpr: float
    non_members: int
    refused: str = ""
    bound: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Roc:
    """The mean ROC curve over targets with its pointwise interval; `floor` is 1 / n_out."""

    fpr_A: Floats
    tpr_A: Floats
    low_A: Floats
    high_A: Floats
    floor: float


@dataclass(frozen=True, kw_only=True)
class AttackFinding:
    """One attack on one group of samples of a cell, over all targets."""

    mode: Literal["online", "offline"]
    group: str
    samples: int
    auc: Estimate
    tpr: tuple[RateAt, ...]
    roc: Roc | None = None


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Memorization scores of a kind of samples: shares of samples by bin."""

    edges_B: Floats
    share_B: Floats
    samples: int
    undefined: int
    mean: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A mean over models for each epoch, with its pointwise interval (NaN where there is none)."""

    value_E: Floats
    low_E: Floats
    high_E: Floats


@dataclass(frozen=True, kw_only=True)
class LayerCurves:
    """Medians over channels, averaged over models, of each batch-norm layer; and C5's share."""

    gamma_EL: Floats
    sigma_EL: Floats
    weight_norm_EL: Floats
    ratio_EL: Floats
    share: Curve


@dataclass(frozen=True, kw_only=True)
class CellFindings:
    """What was found in one (mix, arm)."""

    mix: str
    arm: str
    models: int
    diverged: tuple[int, ...]
    untrained: tuple[int, ...]
    """Models that finished and yet never left chance; they are not left out."""
    refusals: Mapping[str, str]
    """Why an attack mode was refused; empty text where it ran."""
    rates: Mapping[str, Estimate]
    attacks: tuple[AttackFinding, ...]
    excluded: Mapping[str, int]
    entries: int
    """How many (target, sample) entries the attack was asked for."""
    counts: Mapping[str, tuple[int, int, int]]
    """Per-sample shadow models "in" and "out": smallest, median, largest over targets."""
    memorization: Mapping[str, Histogram]
    curves: Mapping[str, Curve]
    """Keys "accuracy/GROUP" and "loss/GROUP", and "train_loss"."""
    layers: LayerCurves | None

    @property
    def refused(self) -> str:
        """Why the online attack was refused; empty where it ran."""
        return self.refusals["online"]

    def attack(self, mode: str, group: str) -> AttackFinding | None:
        """The finding of that mode and group, if there is one."""
        found = (a for a in self.attacks if (a.mode, a.group) == (mode, group))
        return next(found, None)


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Two arms at the epochs where their clean training accuracy is closest."""

    epochs: tuple[int, int]
    accuracy: tuple[float, float]
    auc: Estimate


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One arm minus another, paired by model: the same masks, seeds and samples."""

    mix: str
    left: str
    right: str
    differences: Mapping[str, Estimate]
    """Keys of RATES, and "auc/MODE/GROUP", "tpr@ALPHA/MODE/GROUP", "relative_auc/online/GROUP"."""
    models: int
    matched: Matched | None = None
    unmatched: str = ""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number that a claim is decided by: `estimate` against `threshold`, upward or downward."""

    what: str
    estimate: Estimate
    threshold: float
    upward: bool = True
    unit: Literal["points", "epochs", "share"] = "points"


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A claim decided on one mix: one row per data, net, mix and kind."""

    claim: str
    statement: str
    mix: str
    kind: str
    share: float
    net: str
    arms: tuple[str, ...]
    """The two arms compared, or the one measured."""
    measures: tuple[Measure, ...]
    beside: tuple[Measure, ...]
    """Shown with the row but deciding nothing."""
    verdict: Verdict
    why: str
    p_value: float
    after_holm: bool = False
    models_needed: int | None = None

    @property
    def subject(self) -> str:
        """The arm measured, or the difference taken, as "bn − nobn"."""
        return " − ".join(self.arms)


@dataclass(frozen=True, kw_only=True)
class MixFacts:
    """What a mix is: how many samples of each kind."""

    name: str
    kind: str
    share: float
    samples: int
    outliers: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything the report says about a run."""

    name: str
    question: str
    digest: str
    arms: tuple[str, ...]
    epochs: int
    models: int
    level: float
    variance: str
    query_mode: str
    design: str
    alphas: tuple[float, ...]
    mixes: tuple[MixFacts, ...]
    cells: tuple[CellFindings, ...]
    contrasts: tuple[Contrast, ...]
    claims: tuple[ClaimRow, ...]
    headline: str
    answer: str
    study: Study = field(repr=False)
    manifest: Mapping[str, Any] = field(repr=False)

    def cell(self, mix: str, arm: str) -> CellFindings:
        """The findings of one mix and arm."""
        return next(c for c in self.cells if (c.mix, c.arm) == (mix, arm))

    def mix(self, name: str) -> MixFacts:
        """The facts of one mix."""
        return next(mix for mix in self.mixes if mix.name == name)
