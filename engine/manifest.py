"""The facts a manifest states: what decides a model's bits, hardware, versions, times."""

import datetime
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("shadow-engine", "torch", "torchvision", "numpy", "scipy", "numba", "triton", "ffcv")


def numerics(device: str) -> dict[str, Any]:
    """What decides a model's bits besides the study: implementations, ISA or SM, versions."""
    import torch

    import kernels

    isa = torch.backends.cpu.get_cpu_capability()
    if device == "cuda":
        isa = "sm_{}{}".format(*torch.cuda.get_device_capability())
    decisive = {name: _version(name) for name in ("torch", "numpy", "numba", "triton")}
    return {"device": device, "isa": isa, "versions": decisive, "kernels": kernels.plan()}


def adopt(started: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    """Refuse to mix models of different arithmetic in one run.

    Raises:
        ValueError: device, instruction set or versions differ from those of the first start.
    """
    for name in ("device", "isa", "versions"):
        if started[name] != here[name]:
            raise ValueError(
                f"this run was started with {name} {started[name]}, here it is {here[name]}, and "
                f"models would not be comparable bit for bit: use --out for a fresh run (its "
                f"finished models stay in {folder})"
            )


def complete(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest holds all that a second start needs of the first."""
    numerics = manifest.get("numerics")
    if not isinstance(numerics, Mapping) or not isinstance(manifest.get("started"), str):
        return False
    texts = all(isinstance(numerics.get(name), str) for name in ("device", "isa"))
    return texts and all(isinstance(numerics.get(n), Mapping) for n in ("versions", "kernels"))


def hardware(device: str) -> dict[str, Any]:
    """Processor, usable cores and GPU."""
    from engine.executors.local import usable_cores

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    facts = {"cpu": (names or [platform.processor()])[0], "cores": usable_cores()}
    if device == "cuda":
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries a run depends on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
