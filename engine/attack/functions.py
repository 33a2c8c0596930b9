"""Attacks as functions of a source: where names and settings become parameter objects."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion
from attacks.lira import LiraParameters, lira
from attacks.population import Population
from attacks.quantile import QuantileParameters, quantile
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_p, attack_r, calibrated, loss
from attacks.types import AttackScores, Ints
from engine.attack.settings import Settings
from engine.attack.sources import Source

Function = Callable[[Source, Settings, Ints, Exclusion], AttackScores]


def function(name: str) -> Function:
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
        population = population_of(source, name)
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


def is_slow(name: str, settings: Settings) -> bool:
    """Whether an attack fits something anew for every target."""
    return name == "quantile" or (name == "rmia_offline" and settings.a == "tuned")


def needs_population(name: str) -> bool:
    """Whether an attack compares with samples that no model trained on."""
    return name in ("attack_p", "rmia_online", "rmia_offline", "quantile")


def population_of(source: Source, name: str) -> Population:
    """A source's population. Raises ValueError, naming the attack, for none or no numbers."""
    if source.population is None:
        raise ValueError(
            f"{name} needs scores of samples that no model trained on, and {source.name} has none: "
            "add population_scores_MZQ to the .npz, or use an attack that needs none"
        )
    if not any(np.isfinite(row).any() for row in source.population.scores_MZQ):
        raise ValueError(f"{name}: the population of {source.name} holds no finite score")
    return source.population


@np.errstate(over="ignore", invalid="ignore")
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
