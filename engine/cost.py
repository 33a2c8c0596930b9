"""What a study will cost, before it starts: time, memory, disk, and the size of its stacks.

Time comes from what this machine measured before for the same network, norm, batch and device;
without that, from arithmetic operations and a stated speed, and is marked as a rough estimate.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import files
from engine.plan import ModelRef
from engine.study import Arm, Study

ASSUMED_FLOPS = {"cpu": 30e9, "cuda": 100e12}
"""Sustained operations a second of one core or GPU where nothing was measured yet."""

ASSUMED_SAMPLES = {"cpu": 8e3, "cuda": 1e6}
"""Samples a second that small networks do not exceed, whatever their operations."""

CPU_STACK, CPU_STACK_SMALL, CUDA_STACK = 8, 16, 32
"""Models a stack by default: larger ones gain a few per cent at most and cost memory."""

SMALL = 8 * 2**20
"""Bytes of training below which a model is small: the fixed cost of a step then weighs more."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the cost depends on: samples, population, image (H, W, C), classes.

    mapped: the images lie in a file, and take no memory that training could need.
    """

    pool: int
    population: int
    image: tuple[int, int, int]
    classes: int
    mapped: bool = False


KNOWN_SIZES = {
    "mnist": Sizes(pool=60_000, population=10_000, image=(28, 28, 1), classes=10),
    "fashion_mnist": Sizes(pool=60_000, population=10_000, image=(28, 28, 1), classes=10),
    "cifar10": Sizes(pool=50_000, population=10_000, image=(32, 32, 3), classes=10),
    "cifar100": Sizes(pool=50_000, population=10_000, image=(32, 32, 3), classes=100),
}


def known_sizes(study: Study) -> Sizes | None:
    """The sizes of a torchvision set, without reading or downloading it."""
    known = KNOWN_SIZES.get(study.data.name)
    if known is None or study.data.path:
        return None
    pool = min(study.data.limit or known.pool, known.pool)
    population = min(study.query.population or known.population, known.population)
    return dataclasses.replace(known, pool=pool, population=population)


@dataclass(frozen=True, kw_only=True)
class NetCost:
    """One model of one arm: trainable numbers, operations and activations of a forward pass."""

    parameters: int
    flops_per_sample: float
    activations_per_sample: int

    def stack_bytes(self, batch: int, itemsize: int) -> int:
        """Memory that one more model in a stack takes while training.

        Weights, gradients, momenta and one temporary; activations and their gradients.
        """
        return itemsize * (4 * self.parameters + 3 * batch * self.activations_per_sample)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The estimate that `engine run` prints. `measured` says whether time was measured here."""

    models: int
    stack: int
    workers: int
    seconds: float
    measured: bool
    memory_bytes: int
    disk_bytes: int


def net_cost(arm: Arm, sizes: Sizes) -> NetCost:
    """Count one network by running it once on an empty image."""
    import torch

    from engine.models import build

    height, width, channels = sizes.image
    net = build(
        arm.net, norm=arm.norm, classes=sizes.classes, channels=channels, size=height
    ).eval()
    flops, activations = 0.0, channels * height * width

    def count(module: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        nonlocal flops, activations
        weight = getattr(module, "weight", None)
        activations += output.numel()
        if weight is not None and weight.ndim > 1:
            flops += 2.0 * output.numel() * weight[0].numel()

    for module in net.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with torch.no_grad():
        net(torch.zeros(1, channels, height, width))
    parameters = sum(p.numel() for p in net.parameters())
    return NetCost(
        parameters=parameters, flops_per_sample=flops, activations_per_sample=activations
    )


def estimate(
    study: Study, sizes: Sizes, missing: list[ModelRef], device: str, workers: int, cache: Path
) -> Cost:
    """Time, memory and disk of training the missing models, and the stack size to use.

    Raises:
        ValueError: `resources.stack` models do not fit in memory.
    """
    nets = {arm: net_cost(study.arms[arm], sizes) for arm in study.arms}
    largest, images = _model_bytes(study, nets.values()), _image_bytes(sizes, device)
    stack = _stack_size(study, largest, memory_limit(study, device) - images, device, workers)
    speeds = measured_speeds(cache)
    seconds, measured = 0.0, True
    for arm, net in nets.items():
        count = sum(ref.arm == arm for ref in missing)
        samples = count * trained_samples(study, sizes)
        known = speeds.get(speed_key(study, study.arms[arm], sizes, device))
        measured = measured and known is not None
        by_flops = ASSUMED_FLOPS[device] / (3 * net.flops_per_sample)
        speed = known or min(by_flops, ASSUMED_SAMPLES[device])
        seconds += samples / speed / workers
    scores = study.query.views * (1 + len(study.query.keep_epochs))
    per_model = (sizes.pool + sizes.population) * (4 * scores + 1)
    return Cost(
        models=len(missing),
        stack=stack,
        workers=workers,
        seconds=seconds,
        measured=measured,
        memory_bytes=images + workers * (stack * largest + GIB // 2),
        disk_bytes=len(missing) * per_model,
    )


def most_models(study: Study, sizes: Sizes, device: str) -> int:
    """Models that one process with the study's memory limit trains at once; 0 if not one fits."""
    nets = [net_cost(arm, sizes) for arm in study.arms.values()]
    largest, wanted = _model_bytes(study, nets), study.resources.stack
    free = memory_limit(study, device) - _image_bytes(sizes, device)
    fits = max(0, free // largest)
    if fits and wanted == "auto":
        return _stack_size(study, largest, free, device, 1)
    return fits if wanted == "auto" else min(wanted, fits)


def _model_bytes(study: Study, nets: Iterable[NetCost]) -> int:
    itemsize = 8 if study.train.precision == "float64" else 4
    return max(net.stack_bytes(study.train.batch, itemsize) for net in nets)


def _image_bytes(sizes: Sizes, device: str) -> int:
    height, width, channels = sizes.image
    images = (sizes.pool + sizes.population) * height * width * channels
    return 0 if sizes.mapped and device == "cpu" else images


def trained_samples(study: Study, sizes: Sizes) -> float:
    """Samples one model sees in training, with the queries after it counted as a third each."""
    members = sizes.pool * study.membership.pkeep
    asked = (sizes.pool + sizes.population) * study.query.views
    return study.train.epochs * members + asked / 3


def memory_limit(study: Study, device: str) -> int:
    """Bytes that training may use: the study's limit, else nine tenths of what is available."""
    if study.resources.memory_gib:
        return int(study.resources.memory_gib * GIB)
    if device == "cuda":
        import torch

        return int(0.9 * torch.cuda.mem_get_info()[0])
    return int(0.9 * available_memory())


def available_memory() -> int:
    """Memory the kernel says can be had without swapping, within the container's limit."""
    text = Path("/proc/meminfo").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def _stack_size(study: Study, model_bytes: int, free: int, device: str, workers: int) -> int:
    fits = int(free / workers // model_bytes)
    wanted = study.resources.stack
    if fits < 1:
        raise ValueError(
            f"one model needs about {model_bytes / GIB:.1f} GiB to train and {free / GIB:.1f} GiB "
            f"are there for {workers} processes: lower train.batch or resources.processes"
        )
    if wanted == "auto":
        on_cpu = CPU_STACK_SMALL if model_bytes < SMALL else CPU_STACK
        return min(CUDA_STACK if device == "cuda" else on_cpu, fits)
    if wanted > fits and wanted * model_bytes * workers > free:
        raise ValueError(
            f"a stack of {wanted} models needs about {wanted * model_bytes / GIB:.1f} GiB in each "
            f"of {workers} processes, {free / GIB:.1f} GiB are there: at most "
            f"resources.stack={fits} fits"
        )
    return wanted


def speed_key(study: Study, arm: Arm, sizes: Sizes, device: str) -> str:
    """What a measured speed holds for."""
    image = "x".join(map(str, sizes.image))
    return f"{device} {arm.net} {arm.norm} {image} {study.train.batch} {study.train.precision}"


def measured_speeds(cache: Path) -> dict[str, float]:
    """Samples a second and worker that earlier runs reached, by `speed_key`."""
    try:
        known = json.loads((cache / "speeds.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: float(value) for key, value in known.items()}


def remember_speed(cache: Path, key: str, samples_per_second: float) -> None:
    """Keep a measured speed for later estimates; a cache that cannot be written is no error."""
    known = measured_speeds(cache) | {key: samples_per_second}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        files.write_text(cache / "speeds.json", json.dumps(known, indent=2, sort_keys=True) + "\n")
    except OSError:
        return
