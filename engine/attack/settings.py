"""Attacks by name, and what `--set` may say about them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attacks.interop import READERS
from attacks.lira import CENTRES, VARIANCES
from attacks.metrics import PRIORS
from attacks.quantile import MOST_SEED
from attacks.types import DESIGNS
from engine.study import unknown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `--set` may say; each attack takes what it uses."""

    variance: str = "pooled"
    centre: str = "mean"
    shrinkage: float = 8.0
    gamma: float = 2.0
    a: float | Literal["tuned"] = 0.3
    references: int = 0
    alpha: float = 0.05
    regressor: str = "boosting"
    seed: int = 0
    fpr: tuple[float, ...] = (0.001, 0.01)
    priors: tuple[float, ...] = PRIORS
    level: float = 0.95
    layout: str = "auto"
    design: str = "auto"
    query_mode: str = ""

    def __post_init__(self) -> None:
        for name, choices in (
            ("variance", VARIANCES),
            ("centre", CENTRES),
            ("regressor", ("boosting", "linear")),
            ("layout", LAYOUTS),
            ("design", DESIGNS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(unknown(name, value, choices))
        for name in ("fpr", "priors", "level", "alpha"):
            given = getattr(self, name)
            rates = given if isinstance(given, tuple) else (given,)
            if not all(0 < rate < 1 for rate in rates):
                told = ",".join(f"{rate:g}" for rate in rates)
                raise ValueError(f"--set {name}={told}: expected rates between 0 and 1")
        for name in ("fpr", "priors"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            _require_told_apart(name, getattr(self, name))
        if self.seed > MOST_SEED:
            raise ValueError(f"--set seed={self.seed}: expected 0 to {MOST_SEED}")
        for name in ("references", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--set {name}={getattr(self, name)}: expected 0 or more")
        for name in ("shrinkage", "gamma"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--set {name}={getattr(self, name)}: expected above 0")
        if isinstance(self.a, float) and not 0 <= self.a <= 1:
            raise ValueError(f"--set a={self.a:g}: expected 0 to 1, or tuned")


def _require_told_apart(name: str, rates: tuple[float, ...]) -> None:
    """Columns of tables are named by rates, at six digits."""
    shown = [f"{rate:g}" for rate in rates]
    for place, text in enumerate(shown):
        if text in shown[:place]:
            first, second = rates[shown.index(text)], rates[place]
            raise ValueError(
                f"--set {name}={first!r},{second!r}: both would be called {text}, leave one out"
            )


_LIRA, _RMIA = ("variance", "centre", "shrinkage"), ("gamma", "references")
USES: Mapping[str, tuple[str, ...]] = {
    "loss": (),
    "calibrated": (),
    "attack_p": (),
    "attack_r": (),
    "lira_online": _LIRA,
    "lira_offline": _LIRA,
    "rmia_online": _RMIA,
    "rmia_offline": (*_RMIA, "a"),
    "quantile": ("alpha", "regressor", "seed"),
}
"""The attacks by name, and the settings of their own."""
_COMMON = ("fpr", "priors", "level", "layout", "design", "query_mode")
LAYOUTS = ("auto", *READERS, "npz")


def names(given: Sequence[str]) -> list[str]:
    """Attacks by name, each once. Raises ValueError for one that does not exist."""
    chosen = [part.strip() for name in given for part in name.split(",") if part.strip()]
    if not chosen:
        raise ValueError(f"name an attack: known are {', '.join(USES)}")
    for name in chosen:
        if name not in USES:
            raise ValueError(unknown("attack", name, tuple(USES)))
    return list(dict.fromkeys(chosen))


def settings(texts: Sequence[str], attacks: Sequence[str]) -> Settings:
    """Settings from "key=value" texts; a key that no attack here uses is an error."""
    used = {*_COMMON, *(key for name in attacks for key in USES[name])}
    known = {field.name: field for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: expected key=value")
        if key not in known:
            raise ValueError(unknown("setting", key, tuple(known)))
        if key not in used:
            raise ValueError(f"--set {key} is used by none of {', '.join(attacks)}: leave it out")
        if key in given:
            raise ValueError(f"--set {key} is given twice: give it once")
        given[key] = _parsed(key, value, known[key].default)
    return Settings(**given)


def _parsed(key: str, text: str, default: Any) -> object:
    try:
        if key == "a" and text == "tuned":
            return text
        if isinstance(default, tuple):
            return tuple(float(part) for part in text.split(","))
        return type(default)(text)
    except ValueError:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        raise ValueError(f"--set {key}={text}: expected a value like {shown}") from None
