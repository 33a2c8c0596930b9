"""Derived seeds: every random choice is a hash of (study seed, model_id, purpose, counter, name).

Neither the arm nor the mix enters, so all arms and mixes of a study are paired: model m starts
from the same weights (where shapes agree), sees its samples in the same order and is augmented
alike everywhere. Nothing is drawn from ambient generators. Choices are made from the raw 64-bit
stream of PCG64, which NumPy fixes for good, never from Generator methods, which it may change.
"""

import hashlib

import numpy as np
import numpy.typing as npt

STUDY = -1
"""The model_id of choices that belong to the whole study (outliers, the sample left out)."""


def key(
    study_seed: int, purpose: str, *, model_id: int = STUDY, counter: int = 0, name: str = ""
) -> int:
    """An independent 63-bit key (fits torch's int64) for one random choice.

    >>> key(0, "order", model_id=3) == key(0, "order", model_id=3)
    True
    >>> len({key(s, "order", model_id=m) for s in (0, 1) for m in (0, 1)})
    4
    """
    text = f"{study_seed}|{model_id}|{purpose}|{counter}|{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def raw_bits(chosen_key: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` independent uniform 64-bit words under a key."""
    return np.random.PCG64(chosen_key).random_raw(count)


def permutation(chosen_key: int, count: int) -> npt.NDArray[np.int64]:
    """A uniform permutation of range(count) under a key.

    >>> sorted(permutation(7, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(raw_bits(chosen_key, count), kind="stable")


def integers(chosen_key: int, count: int, bound: int) -> npt.NDArray[np.int64]:
    """`count` integers in [0, bound); the bias of the modulus is below bound / 2**64.

    >>> bool((integers(7, 1000, 9) < 9).all())
    True
    """
    return (raw_bits(chosen_key, count) % np.uint64(bound)).astype(np.int64)


def uniform(chosen_key: int, count: int) -> npt.NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) with 53 random bits."""
    return (raw_bits(chosen_key, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
