"""What trained models say: every sample and population image, by views, as scores.

M models, N samples, X images asked, Q queries (views) an image, Z population images, B batch,
K classes. The score is the logit-scaled confidence phi = z_y - logsumexp(z_j, j != y) from logits
in float64 (Carlini et al. 2022, section 4); loss = softplus(-phi) and p_y = sigmoid(phi) need no
storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import kernels
from engine import stack
from engine.plan import MixTable, ModelRef, StudyData
from engine.stack import StackedState
from engine.study import Study

EVAL_BATCH = 128
"""Images a model is asked at once in eval mode; fixed, so that no result depends on the stack."""

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The resident image table on the training device and how it is normalised."""

    images_RHWC: Tensor
    mean_C: tuple[float, ...]
    std_C: tuple[float, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class View:
    """One way to look at an image: shifted by (dy, dx) pixels with reflection, perhaps flipped."""

    dy: int
    dx: int
    flip: bool


@dataclass(frozen=True, kw_only=True)
class Answers:
    """phi_MXQ float32; correct_MX: whether the plain view's prediction is the label asked for."""

    phi_MXQ: npt.NDArray[np.float32]
    correct_MX: npt.NDArray[np.bool_]


def pictures(data: StudyData, device: torch.device | str, dtype: torch.dtype) -> Pictures:
    """A study's images on a device."""
    images = torch.from_numpy(data.images_RHWC).to(device)
    return Pictures(images_RHWC=images, mean_C=data.mean_C, std_C=data.std_C, dtype=dtype)


def phi(logits_BK: npt.NDArray[np.floating], label_B: Ints) -> npt.NDArray[np.float64]:
    """Logit-scaled confidence of the given labels; NaN where logits are not finite.

    >>> phi(np.log([[0.8, 0.1, 0.1]]), np.array([0])).round(6).tolist()  # log(p / (1 - p))
    [1.386294]
    """
    others = logits_BK.astype(np.float64)
    rows = np.arange(len(label_B))
    own = others[rows, label_B]
    others[rows, label_B] = -np.inf
    top = others.max(1)
    with np.errstate(invalid="ignore"):
        rest = top + np.log(np.exp(others - top[:, None]).sum(1))
        difference: npt.NDArray[np.float64] = own - rest
    return difference


def loss(phi_X: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Cross-entropy of the label from its phi: softplus(-phi).

    >>> loss(np.array([0.0, 800.0, -800.0])).round(6).tolist()
    [0.693147, 0.0, 800.0]
    """
    with np.errstate(invalid="ignore"):
        return np.logaddexp(0.0, -phi_X.astype(np.float64))


def views(count: int, size: int) -> tuple[View, ...]:
    """The first `count` of 18 views: plain, flipped, then both under eight shifts.

    A shift moves by an eighth of the image, at least one pixel: 4 pixels of 32.

    >>> views(3, 32)[0], views(3, 32)[2]
    (View(dy=0, dx=0, flip=False), View(dy=-4, dx=0, flip=False))
    """
    far = max(1, size // 8)
    steps = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
    every = [View(dy=y * far, dx=x * far, flip=flip) for y, x in steps for flip in (False, True)]
    return tuple(every[:count])


def ask(
    skeleton: nn.Module,
    state: StackedState,
    shown: Pictures,
    row_X: Ints,
    label_MX: Ints,
    *,
    looks: Sequence[View],
    batch_statistics: int = 0,
) -> Answers:
    """Ask every model about the same images, each by its own labels.

    Args:
        skeleton: the network; it is put in eval mode unless `batch_statistics` is given.
        state: M models.
        shown: the resident images.
        row_X: resident rows of the images asked about.
        label_MX: the labels whose confidence is wanted.
        looks: the Q views.
        batch_statistics: 0, or the batch size with which batch norm normalises the images asked
            about by their own statistics (which leaks them; running ones stay as they are). The
            last batch is filled up from the first images.
    """
    models, images = label_MX.shape
    phi_MXQ = np.empty((models, images, len(looks)), dtype=np.float32)
    correct_MX = np.empty((models, images), dtype=bool)
    skeleton.train(bool(batch_statistics))
    if batch_statistics:
        state = replace(state, buffers=state.clone_buffers())
    for first, chunk in _batches(row_X, batch_statistics):
        part = slice(first, min(first + len(chunk), images))
        for q, look in enumerate(looks):
            logits_MBK = _logits(skeleton, state, shown, chunk, look)
            for m in range(models):
                logits = logits_MBK[m, : part.stop - first]
                confidence = phi(logits, label_MX[m, part])
                phi_MXQ[m, part, q] = confidence
                if q == 0:
                    right = logits.argmax(1) == label_MX[m, part]
                    correct_MX[m, part] = right & np.isfinite(confidence)
    return Answers(phi_MXQ=phi_MXQ, correct_MX=correct_MX)


def _batches(row_X: Ints, batch_statistics: int) -> Iterator[tuple[int, Ints]]:
    size = batch_statistics or EVAL_BATCH
    for first in range(0, len(row_X), size):
        chunk = row_X[first : first + size]
        if batch_statistics and len(chunk) < size:
            chunk = np.concatenate([chunk, np.resize(row_X, size - len(chunk))])
        yield first, chunk


def _logits(
    skeleton: nn.Module, state: StackedState, shown: Pictures, rows: Ints, look: View
) -> npt.NDArray[np.floating]:
    index = torch.from_numpy(rows).to(shown.images_RHWC.device)
    images = kernels.view(
        shown.images_RHWC,
        index,
        shown.mean_C,
        shown.std_C,
        dy=look.dy,
        dx=look.dx,
        flip=look.flip,
        dtype=shown.dtype,
    )
    logits: npt.NDArray[np.floating] = (
        stack.forward(skeleton, state, images[None].expand(state.models, *images.shape))
        .cpu()
        .numpy()
    )
    return logits


def query_stack(
    study: Study,
    refs: Sequence[ModelRef],
    data: StudyData,
    skeleton: nn.Module,
    state: StackedState,
    shown: Pictures,
) -> list[Arrays]:
    """Every model's scores on all samples of its mix and on the population.

    Returns for each ref phi_NQ, correct_N, population_phi_ZQ, population_correct_Z.
    """
    looks = views(study.query.views, data.images_RHWC.shape[1])
    statistics = study.train.batch if study.query.mode == "train_batch_stats" else 0
    found: dict[int, Arrays] = {}
    for slots, table in by_images(refs, data):
        part = state if len(slots) == len(refs) else state.select(slots)
        label_MN = np.stack([data.tables[refs[slot].mix].label_N for slot in slots])
        pool = ask(
            skeleton,
            part,
            shown,
            table.image_N,
            label_MN,
            looks=looks,
            batch_statistics=statistics,
        )
        population = ask(
            skeleton,
            part,
            shown,
            data.population_rows_Z,
            np.broadcast_to(data.population_labels_Z, (len(slots), len(data.population_labels_Z))),
            looks=looks,
            batch_statistics=statistics,
        )
        for m, slot in enumerate(slots):
            found[slot] = {
                "phi_NQ": pool.phi_MXQ[m],
                "correct_N": pool.correct_MX[m],
                "population_phi_ZQ": population.phi_MXQ[m],
                "population_correct_Z": population.correct_MX[m],
            }
    return [found[slot] for slot in range(len(refs))]


def by_images(
    refs: Sequence[ModelRef], data: StudyData
) -> Iterator[tuple[tuple[int, ...], MixTable]]:
    """Slots whose mixes show the same images, with one of their tables (labels may differ)."""
    groups: dict[bytes, list[int]] = {}
    for slot, ref in enumerate(refs):
        groups.setdefault(data.tables[ref.mix].image_N.tobytes(), []).append(slot)
    for slots in groups.values():
        yield tuple(slots), data.tables[refs[slots[0]].mix]
