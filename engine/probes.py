"""What is watched while models train: losses and accuracies by group, gamma, sigma and |w|.

M models, P probe images, E epochs, G groups, L batch norm layers. Probes are all outliers of a
mix, as many clean samples (of a clean mix up to 500) and up to 500 population images, asked in
eval mode after every epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine import seeds, signals
from engine.models.layers import BatchNorm
from engine.outliers import CLEAN
from engine.plan import MixTable, ModelRef, StudyData
from engine.stack import StackedState
from engine.study import Study

GROUPS = ("clean_in", "clean_out", "outlier_in", "outlier_out", "population")
MOST = 500
"""Clean probes of a clean mix, and population probes, at most."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ProbeSet:
    """Images watched: resident row, label and pool sample (-1 for population images)."""

    row_P: Ints
    label_P: Ints
    sample_P: Ints


def probe_set(study_seed: int, table: MixTable, data: StudyData) -> ProbeSet:
    """The probes of a mix, the same for all its models and arms."""
    outliers = np.flatnonzero(table.kind_N != CLEAN)
    clean = np.flatnonzero(table.kind_N == CLEAN)
    order = seeds.permutation(seeds.key(study_seed, "probe", name="clean"), len(clean))
    wanted = len(outliers) or MOST
    samples = np.concatenate([outliers, np.sort(clean[order[:wanted]])])
    population = len(data.population_rows_Z)
    order = seeds.permutation(seeds.key(study_seed, "probe", name="population"), population)
    others = np.sort(order[:MOST])
    return ProbeSet(
        row_P=np.concatenate([table.image_N[samples], data.population_rows_Z[others]]),
        label_P=np.concatenate([table.label_N[samples], data.population_labels_Z[others]]),
        sample_P=np.concatenate([samples, np.full(len(others), -1)]),
    )


def group_masks(
    probes: ProbeSet, kind_N: npt.NDArray[np.uint8], keep_N: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """(G, P): which probes belong to which of GROUPS, for one model."""
    pool = probes.sample_P >= 0
    clean = pool & (kind_N[probes.sample_P] == CLEAN)
    member = pool & keep_N[probes.sample_P]
    outlier = pool & ~clean
    return np.stack([clean & member, clean & ~member, outlier & member, outlier & ~member, ~pool])


class Watch:
    """Collects the curves of a stack, epoch by epoch."""

    def __init__(self, study: Study, refs: Sequence[ModelRef], data: StudyData) -> None:
        self.refs, self.data = refs, data
        self.looks = signals.views(1, data.images_RHWC.shape[1])
        mixes = {ref.mix for ref in refs}
        self.probes = {mix: probe_set(study.seed, data.tables[mix], data) for mix in mixes}
        self.epochs: list[list[signals.Arrays]] = []

    def after_epoch(
        self,
        skeleton: nn.Module,
        state: StackedState,
        shown: signals.Pictures,
        train_loss_M: npt.NDArray[np.float64],
    ) -> None:
        """Ask all models about their probes and note what their batch norms hold."""
        inner = batch_norms(skeleton, state)
        rows: dict[int, signals.Arrays] = {}
        for mix, probes in self.probes.items():
            slots = [slot for slot, ref in enumerate(self.refs) if ref.mix == mix]
            part = state if len(slots) == len(self.refs) else state.select(slots)
            label_MP = np.broadcast_to(probes.label_P, (len(slots), len(probes.label_P)))
            answers = signals.ask(skeleton, part, shown, probes.row_P, label_MP, looks=self.looks)
            for m, slot in enumerate(slots):
                rows[slot] = {
                    **self._curves(slot, probes, answers, m),
                    "train_loss_E": np.array(train_loss_M[slot], dtype=np.float32),
                    **{name: values_ML[slot] for name, values_ML in inner.items()},
                }
        self.epochs.append([rows[slot] for slot in range(len(self.refs))])

    def _curves(
        self, slot: int, probes: ProbeSet, answers: signals.Answers, m: int
    ) -> signals.Arrays:
        ref = self.refs[slot]
        table = self.data.tables[ref.mix]
        masks_GP = group_masks(probes, table.kind_N, table.keep_MN[ref.model_id])
        loss_P = signals.loss(answers.phi_MXQ[m, :, 0])
        return {
            "curve_loss_EG": _means(loss_P, masks_GP),
            "curve_accuracy_EG": _means(answers.correct_MX[m].astype(np.float64), masks_GP),
        }

    def arrays(self, slot: int) -> signals.Arrays:
        """One model's curves, epochs first."""
        mine = [epoch[slot] for epoch in self.epochs]
        return {name: np.stack([row[name] for row in mine]) for name in mine[0]}


def _means(
    value_P: npt.NDArray[np.float64], masks_GP: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    means = [value_P[mask].mean() if mask.any() else np.nan for mask in masks_GP]
    return np.array(means, dtype=np.float32)


def batch_norms(skeleton: nn.Module, state: StackedState) -> Mapping[str, npt.NDArray[np.float32]]:
    """Medians over channels of |gamma|, sigma, |gamma| / sigma and the norm of the weights, (M, L).

    sigma is the running one; the weights are those of the convolution in the norm's own block (NaN
    where it has none). Nothing for networks without batch norm.
    """
    layers = [(p, n) for p, n in skeleton.named_modules() if isinstance(n, BatchNorm)]
    names = ("gamma_EL", "sigma_EL", "gamma_over_sigma_EL", "weight_norm_EL")
    if not layers:
        return {}
    found = {name: np.full((state.models, len(layers)), np.nan, np.float32) for name in names}
    for layer, (path, norm) in enumerate(layers):
        sigma_MC = np.sqrt(_numpy(state.buffers[f"{path}.running_var"]) + norm.eps)
        weight = state.params.get(f"{path}.weight")
        gamma_MC = np.ones_like(sigma_MC) if weight is None else np.abs(_numpy(weight))
        conv = state.params.get(f"{path.rpartition('.')[0]}.conv.weight".lstrip("."))
        for m in range(state.models):
            found["gamma_EL"][m, layer] = np.median(gamma_MC[m])
            found["sigma_EL"][m, layer] = np.median(sigma_MC[m])
            found["gamma_over_sigma_EL"][m, layer] = np.median(gamma_MC[m] / sigma_MC[m])
            if conv is not None:
                found["weight_norm_EL"][m, layer] = np.sqrt(np.square(_numpy(conv[m])).sum())
    return found


def _numpy(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = tensor.detach().double().cpu().contiguous().numpy()
    return values
