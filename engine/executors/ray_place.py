"""What a cluster offers a study: workers, memory, and the arithmetic of its machines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine import manifest

SURVEY_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Taken once, when connecting. slots: shards trained at once."""

    device: str
    nodes: int
    slots: int
    bytes_per_slot: int
    numerics: Mapping[str, Any]
    hardware: Mapping[str, Any]


def slots(ray: Any, demand: Mapping[str, Any]) -> dict[str, int]:
    """Node id -> shards that it trains at once, of the nodes alive."""
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            count = int(has.get("CPU", 0) // demand["num_cpus"])
            if demand["num_gpus"]:
                count = min(count, int(has.get("GPU", 0) // demand["num_gpus"]))
            if count:
                found[str(node["NodeID"])] = count
    return found


def survey(ray: Any, device: str) -> Survey:
    """Look at the cluster, and let one worker say what decides a model's bits there.

    Raises:
        ValueError: no node can train this study on that device.
        RuntimeError: no worker answered.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device '{device}': known are auto, cpu, cuda")
    if device == "cuda" and not gpus:
        raise ValueError(
            "device cuda was asked for, but the cluster has no GPU: add GPU nodes or use "
            "--device cpu"
        )
    device = "cuda" if gpus and device != "cpu" else "cpu"
    demand = {"num_cpus": 1, "num_gpus": int(device == "cuda")}
    found = slots(ray, demand)
    if not found:
        raise ValueError(
            "no node of the cluster has a CPU"
            + (" and a GPU" if demand["num_gpus"] else "")
            + " to offer: start its nodes with --num-cpus above 0"
        )
    numerics, hardware, gpu_bytes = _ask_worker(ray, device, demand)
    memory = {node["NodeID"]: node["Resources"].get("memory", 0) for node in ray.nodes()}
    smallest = min(int(memory[node] // count) for node, count in found.items())
    return Survey(
        device=device,
        nodes=len(found),
        slots=sum(found.values()),
        bytes_per_slot=int(0.9 * (gpu_bytes if device == "cuda" else smallest)),
        numerics=numerics,
        hardware=hardware,
    )


def _ask_worker(ray: Any, device: str, demand: Mapping[str, Any]) -> Any:
    asked = ray.remote(_facts).options(**demand, max_retries=1).remote(device)
    try:
        return ray.get(asked, timeout=SURVEY_SECONDS)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(asked, force=True)
        raise RuntimeError(
            f"no worker of the cluster answered within {SURVEY_SECONDS:.0f} s: is it busy with "
            "other work? (`ray status` shows it)"
        ) from None
    except ray.exceptions.RayError as error:
        lines = str(error).strip().split("\n")
        raise RuntimeError(
            "a worker of the cluster could not load this package: install the same versions on "
            f"every node ({lines[-1][:200]})"
        ) from None


def _facts(device: str) -> Any:
    """Runs in a worker."""
    gpu_bytes = 0
    if device == "cuda":
        import torch

        gpu_bytes = torch.cuda.mem_get_info()[0]
    return manifest.numerics(device), manifest.hardware(device), gpu_bytes
