"""A study: the question, and every choice that an answer depends on.

Frozen, keyword-only dataclasses checked at the border; `load_study` reads TOML. Imports no torch.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.models.catalog import NETS

NUMERICS = 4
"""Raised whenever a change of ours alters the arrays a model exports."""

MOST_MODELS = 1_000_000
"""Models an arm; more is a typing error."""

DataName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "npz", "folder"]
TORCHVISION_SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the images come from. `limit` keeps that many training images by seed (0: all).

    spread: how workers get them: "memory" sends them, "beton" lets every machine map a file that it
    makes from its own copy of the beton; "auto" is "beton" where memory is short.
    """

    name: DataName
    path: str = ""
    limit: int = 0
    loader: Literal["auto", "ffcv", "resident"] = "auto"
    spread: Literal["auto", "memory", "beton"] = "auto"
    cache: str = ""

    def __post_init__(self) -> None:
        _require(
            self.limit >= 0, f"data.limit is {self.limit}: expected 0 (all) or a positive count"
        )
        if self.name == "digits":
            _require(not self.path, "data.path is not used: the digits come with scikit-learn")
        if self.spread == "beton":
            _require(
                self.loader != "resident",
                "data.spread = 'beton' needs FFCV: set data.loader to 'auto' or 'ffcv'",
            )
        if self.name in ("npz", "folder"):
            _require(bool(self.path), f"data.name = '{self.name}' needs data.path")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """An outlier mix: which share of the samples is flipped or replaced by OOD images."""

    kind: Literal["clean", "flipped", "ood"] = "clean"
    share: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        _require(0 <= self.share <= 0.5, f"a mix's share is {self.share}: expected 0 to 0.5")
        if self.kind == "clean":
            _require(self.share == 0, "a clean mix has no outliers: leave out its share")
        else:
            _require(self.share > 0, f"a mix of kind '{self.kind}' needs a share above 0")
        if self.kind == "ood":
            _require(bool(self.source), "a mix of kind 'ood' needs a source (a data name or .npz)")
        else:
            _require(not self.source, f"a mix of kind '{self.kind}' uses no source: leave it out")


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """The gamma/sigma penalty P = lambda * sum over layers of mean_c phi(gamma_c / sigma_c).

    phi(r) = r^2 ("square") or max(0, |r| - tau)^2 ("hinge"); `through_sigma` lets the gradient
    flow through the batch's sigma. Both forms are ours: the source's own form is unknown.
    """

    form: Literal["hinge", "square"]
    lambda_: float
    tau: float = 1.0
    through_sigma: bool = True

    def __post_init__(self) -> None:
        _require(self.lambda_ >= 0, f"penalty.lambda is {self.lambda_}: expected 0 or more")
        _require(self.tau >= 0, f"penalty.tau is {self.tau}: expected 0 or more")
        if self.form == "square":
            _require(self.tau == 1.0, "penalty.tau is used by the hinge form only: leave it out")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a network, its norm and what differs from `train`."""

    net: str
    norm: str
    lr: float | None = None
    weight_decay: float | None = None
    penalty: Penalty | None = None
    freeze_gamma: bool = False

    def __post_init__(self) -> None:
        _require(self.net in NETS, unknown("network", self.net, NETS))
        norms = NETS[self.net]
        _require(self.norm in norms, unknown(f"norm of {self.net}", self.norm, norms))
        if self.norm != "batch":
            _require(self.penalty is None, f"a penalty needs norm = 'batch', not '{self.norm}'")
            _require(not self.freeze_gamma, f"freeze_gamma needs norm 'batch', not '{self.norm}'")
        _require(self.lr is None or self.lr > 0, f"an arm's lr is {self.lr}: expected above 0")
        _require(self.weight_decay is None or self.weight_decay >= 0, "weight_decay is below 0")


@dataclass(frozen=True, kw_only=True)
class Train:
    """SGD and its schedule; crop (padding in pixels), flip and cutout (side in pixels) augment."""

    epochs: int
    batch: int
    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: Literal["cosine", "one_cycle", "constant"] = "cosine"
    warmup: float = 0.0
    crop: int = 0
    flip: bool = False
    cutout: int = 0
    precision: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, f"train.epochs is {self.epochs}: expected 1 or more")
        _require(self.batch >= 2, f"train.batch is {self.batch}: expected 2 or more")
        _require(self.lr > 0, f"train.lr is {self.lr}: expected above 0")
        _require(0 <= self.momentum < 1, f"train.momentum is {self.momentum}: expected 0 to 1")
        _require(self.momentum > 0 or not self.nesterov, "train.nesterov needs a momentum")
        _require(self.weight_decay >= 0, "train.weight_decay is below 0")
        _require(0 <= self.warmup <= self.epochs, "train.warmup (epochs) must fit in train.epochs")
        _require(min(self.crop, self.cutout) >= 0, "train.crop and train.cutout are 0 or more")


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The design of the keep mask: who trains on what."""

    design: Literal["paired", "balanced", "bernoulli"] = "paired"
    pkeep: float = 0.5

    def __post_init__(self) -> None:
        _require(0 < self.pkeep < 1, f"membership.pkeep is {self.pkeep}: expected between 0 and 1")
        if self.design != "bernoulli":
            _require(self.pkeep == 0.5, f"membership.pkeep is not used by '{self.design}' masks")


@dataclass(frozen=True, kw_only=True)
class Query:
    """What every trained model is asked.

    views: queries a sample, 1 (plain) to 18 (two flips times nine shifts). population: how many
    never-trained test images (0: all). keep_epochs: epochs after which scores are kept too.
    """

    views: int = 1
    mode: Literal["eval", "train_batch_stats"] = "eval"
    population: int = 0
    keep_epochs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(1 <= self.views <= 18, f"query.views is {self.views}: expected 1 to 18")
        _require(self.population >= 0, "query.population is 0 (all) or a positive count")
        _require(all(e >= 1 for e in self.keep_epochs), "query.keep_epochs counts from 1")


@dataclass(frozen=True, kw_only=True)
class Attacks:
    """How scores become answers; free to change after training."""

    variance: Literal["pooled", "per_example"] = "pooled"
    fpr: tuple[float, ...] = (0.001, 0.01)
    level: float = 0.95
    contrasts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(all(0 < a < 1 for a in self.fpr), "attacks.fpr lists rates between 0 and 1")
        _require(0 < self.level < 1, "attacks.level is a confidence level between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How the work is laid out; changes no result. 0 means: chosen from the machine."""

    stack: int | Literal["auto"] = "auto"
    processes: int | Literal["auto"] = "auto"
    memory_gib: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stack", "processes"):
            value = getattr(self, name)
            good = value == "auto" or (isinstance(value, int) and value >= 1)
            _require(good, f"resources.{name} is {value!r}: expected 'auto' or 1 or more")
        _require(self.memory_gib >= 0, "resources.memory_gib is 0 (the machine's) or positive")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything a run does, resolved. `contrasts` pairs arms as "bn - nobn"."""

    name: str
    question: str
    data: Data
    mixes: Mapping[str, Mix]
    arms: Mapping[str, Arm]
    models: int
    train: Train
    cost: str = ""
    expected: str = ""
    seed: int = 0
    membership: Membership = field(default_factory=Membership)
    query: Query = field(default_factory=Query)
    attacks: Attacks = field(default_factory=Attacks)
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        most = MOST_MODELS
        _require(
            1 <= self.models <= most, f"models is {self.models}: expected 1 to {most:,} an arm"
        )
        _require(bool(self.mixes), "a study needs at least one mix")
        _require(bool(self.arms), "a study needs at least one arm")
        for name, mix in self.mixes.items():
            _require(
                mix.kind != "ood" or mix.source not in (self.data.name, self.data.path),
                f"mixes.{name}.source is '{mix.source}', the study's own images, which are not "
                "out of distribution: name another set",
            )
        for epoch in self.query.keep_epochs:
            _require(
                epoch < self.train.epochs,
                f"query.keep_epochs holds {epoch}, but training ends after {self.train.epochs} "
                "(train.epochs): name earlier epochs, or none (query.keep_epochs=[])",
            )
        self.contrasts()

    def contrasts(self) -> tuple[tuple[str, str], ...]:
        """Pairs of arms to subtract; by default the first arm minus each of the others."""
        if not self.attacks.contrasts:
            first, *others = self.arms
            return tuple((first, other) for other in others)
        pairs = []
        for text in self.attacks.contrasts:
            left, minus, right = (part.strip() for part in text.partition(" - "))
            _require(bool(minus), f"contrast '{text}': expected the form 'bn - nobn'")
            for arm in (left, right):
                _require(arm in self.arms, unknown("arm", arm, self.arms))
            _require(left != right, f"contrast '{text}' compares an arm with itself")
            _require((left, right) not in pairs, f"contrast '{text}' is listed twice")
            pairs.append((left, right))
        return tuple(pairs)

    def digest(self, data_digest: str) -> str:
        """12 hex digits over all that changes a model's exported arrays, and nothing else.

        The number of models enters with balanced masks only: others grow without changing.
        """
        chosen = {
            "numerics": NUMERICS,
            "data": [self.data.name, self.data.limit, data_digest],
            "mixes": {name: dataclasses.asdict(mix) for name, mix in self.mixes.items()},
            "arms": {name: dataclasses.asdict(arm) for name, arm in self.arms.items()},
            "train": dataclasses.asdict(self.train),
            "seed": self.seed,
            "membership": dataclasses.asdict(self.membership),
            "models": self.models if self.membership.design == "balanced" else "any",
            "query": dataclasses.asdict(self.query),
        }
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


def unknown(what: str, given: str, known: Collection[str]) -> str:
    """One sentence for a name that does not exist: the nearest valid one and the whole list."""
    import difflib

    longer = [name for name in known if given and name.startswith(given)]
    nearest = longer or difflib.get_close_matches(given, list(known), n=1, cutoff=0.4)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"unknown {what} '{given}': {hint}known are {', '.join(known)}"
