"""Groups of samples that rows are about: kinds, classes, tenths of memorization.

N samples, T targets. A group is a mask (N,), or (T, N) where every target has its own.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from attacks.exclusion import Exclusion
from attacks.memorization import memorization_without
from attacks.metrics import deciles
from attacks.types import Bools, Ints
from engine.attack.sources import Source
from engine.outliers import CLEAN, KINDS
from engine.study import unknown

Groups = Mapping[str, Bools]
BY = ("kind", "class", "decile")


def by(text: str) -> tuple[str, ...]:
    """What `--groups` asks for, e.g. "kind,decile". Raises ValueError for what does not exist."""
    wanted = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in wanted:
        if name not in BY:
            raise ValueError(unknown("grouping", name, BY))
    if not wanted:
        raise ValueError(f"--groups names nothing: known are {', '.join(BY)}")
    return wanted


def check(source: Source, wanted: Sequence[str]) -> None:
    """Raise ValueError where the source cannot tell the groups asked for."""
    if "class" in wanted and source.labels_N is None:
        raise ValueError(
            f"groups by class need labels, and {source.name} has none: put labels_N into the "
            ".npz, or y_train.npy beside the models"
        )
    if "decile" in wanted and source.correct_MN is None:
        raise ValueError(
            f"groups by memorization decile need to know which predictions are correct, and "
            f"{source.name} does not say: put correct_MN into the .npz, or logits into the folders"
        )


def groups(source: Source, wanted: Sequence[str], plan: Exclusion, targets: Ints) -> Groups:
    """All samples, and the groups asked for."""
    found: dict[str, Bools] = {"all": np.ones(source.matrix.samples, dtype=bool)}
    if "kind" in wanted:
        found |= kinds(source)
    if "class" in wanted and source.labels_N is not None:
        classes = np.unique(source.labels_N).tolist()
        found |= {f"class_{label}": source.labels_N == label for label in classes}
    if "decile" in wanted and source.correct_MN is not None:
        found |= _deciles(source, source.correct_MN, plan, targets)
    return found


def kinds(source: Source) -> dict[str, Bools]:
    """The clean samples and each kind of outliers; nothing where all are clean or none is known."""
    if source.kind_N is None or (source.kind_N == CLEAN).all():
        return {}
    return {
        KINDS[code] if 0 <= code < len(KINDS) else f"kind_{code}": source.kind_N == code
        for code in np.unique(source.kind_N).tolist()
    }


def _deciles(source: Source, correct_MN: Bools, plan: Exclusion, targets: Ints) -> Groups:
    """For each target the tenths of the samples by memorization in the models it is scored from."""
    scores_TN = memorization_without(
        correct_MN, source.matrix.keep_MN, targets, models=source.models, plan=plan
    )
    of_target = [deciles(score_N) for score_N in scores_TN]
    stacked = {name: np.stack([of[name] for of in of_target]) for name in of_target[0]}
    return {name: mask_TN for name, mask_TN in stacked.items() if mask_TN.any()}
