"""What came back from a worker is checked before it is stored. Imports no Ray.

N pool samples, Q views, Z population images, E epochs (of kept arrays: kept epochs).
"""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine.executors.base import Job, Stack
from engine.plan import ModelResult

_NAME = re.compile(r"[a-z][a-z0-9_]*?(_([A-Z]+))?")


def checked(received: object, stack: Stack, job: Job) -> list[ModelResult]:
    """The results of a stack, rebuilt from parts of the expected types, shapes and dtypes.

    Axes are read off the names: phi_NQ has a row a pool sample and a column a view. Axes that the
    study does not decide (groups, layers) must agree between the models of an arm.

    Raises:
        ValueError: something else was received; the sentence says what.
    """
    if type(received) is not list or len(received) != len(stack):
        raise ValueError(f"expected a list of {len(stack)} results")
    sizes = _axis_sizes(job)
    layouts: dict[str, dict[str, tuple[object, ...]]] = {}
    results = []
    for ref, result in zip(stack, received, strict=True):
        if type(result) is not ModelResult or result.ref != ref:
            raise ValueError(f"expected the result of {ref.mix}/{ref.arm} model {ref.model_id}")
        if not isinstance(result.arrays, Mapping) or not result.arrays:
            raise ValueError("a result holds no arrays")
        if type(result.seconds) is not float:
            raise ValueError("the seconds of a result are no float")
        arrays = {name: _array(name, value, sizes) for name, value in result.arrays.items()}
        layout: dict[str, tuple[object, ...]] = {
            name: (a.dtype, a.shape) for name, a in arrays.items()
        }
        if layouts.setdefault(ref.arm, layout) != layout:
            raise ValueError("models of one arm returned arrays of different names or shapes")
        results.append(ModelResult(ref=ref, arrays=arrays, seconds=result.seconds))
    return results


def _axis_sizes(job: Job) -> dict[str, int]:
    pool = next(iter(job.data.tables.values())).label_N
    return {
        "N": len(pool),
        "Q": job.study.query.views,
        "Z": len(job.data.population_labels_Z),
        "E": job.study.train.epochs,
        "kept E": len(job.study.query.keep_epochs),
    }


def _array(name: object, value: object, sizes: Mapping[str, int]) -> npt.NDArray[np.generic]:
    match = _NAME.fullmatch(name) if type(name) is str else None
    if match is None:
        raise ValueError(f"an array has the name {name!r}")
    if type(value) is not np.ndarray or value.dtype.kind not in "bfiu":
        raise ValueError(f"{name} is no array of numbers")
    if not value.dtype.isnative or not value.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous in native byte order")
    axes = match.group(2) or ""
    kept = "kept " if str(name).startswith("kept_") else ""
    wanted = [sizes.get(f"{kept}{axis}", sizes.get(axis)) for axis in axes]
    fits = len(wanted) == value.ndim and all(
        size is None or size == length for size, length in zip(wanted, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {value.shape}, expected {tuple(wanted)}")
    return value
