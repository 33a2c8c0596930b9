"""Derived seeds: every random choice is a hash of (study seed, model_id, purpose, counter, name).

Neither the arm nor the mix enters, so all arms and mixes of a study are paired: model m starts
from the same weights (where shapes agree), sees its samples in the same order and is augmented
alike everywhere. Nothing is drawn from ambient generators.
"""

import hashlib

import numpy as np

STUDY = -1
"""The model_id of choices that belong to the whole study (outliers, the sample left out)."""


def key(
    study_seed: int, purpose: str, *, model_id: int = STUDY, counter: int = 0, name: str = ""
) -> int:
    """An independent 63-bit key (fits torch's int64) for one random choice.

    >>> key(0, "order", model_id=3) == key(0, "order", model_id=3)
    True
    >>> len({key(s, "order", model_id=m, counter=e) for s in (0, 1) for m in (0, 1) for e in (0, 1)})
    8
    """
    text = f"{study_seed}|{model_id}|{purpose}|{counter}|{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(
    study_seed: int, purpose: str, *, model_id: int = STUDY, counter: int = 0, name: str = ""
) -> np.random.Generator:
    """NumPy's PCG64 generator under `key` (its stream is fixed by NumPy's compatibility policy)."""
    chosen = key(study_seed, purpose, model_id=model_id, counter=counter, name=name)
    return np.random.Generator(np.random.PCG64(chosen))
