"""What a cluster offers a study: workers, memory, and the arithmetic of its machines."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import cost, manifest
from engine.executors import ray_travel
from engine.executors.base import Job

SURVEY_SECONDS = 180.0
NODE = "ray.io/node-id"
KIND = "ray.io/accelerator-type"
"""The label by which Ray tells kinds of GPUs apart."""

CONTEXT_BYTES = 2**29
"""What CUDA takes for every process that shares a GPU."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one shard occupies: a CPU, and on GPU clusters a GPU of one kind or a share of it.

    shards_per_gpu: 0 without GPUs. kind: as in the label KIND; empty where nodes carry none.
    """

    shards_per_gpu: int = 0
    kind: str = ""

    def resources(self) -> dict[str, float]:
        """As a task's options. Ray keeps four decimals of a share.

        >>> Demand(shards_per_gpu=3).resources()
        {'num_cpus': 1, 'num_gpus': 0.3333}
        """
        per = self.shards_per_gpu
        share = 0 if per == 0 else 1 if per == 1 else math.floor(10_000 / per) / 10_000
        return {"num_cpus": 1, "num_gpus": share}

    def labels(self) -> dict[str, str]:
        """As a task's label selector."""
        return {KIND: self.kind} if self.kind else {}


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Taken once, when connecting. slots: shards trained at once.

    bytes_per_slot: memory of the largest worker, for planning.
    """

    device: str
    demand: Demand
    nodes: int
    slots: int
    bytes_per_slot: int
    numerics: Mapping[str, Any]
    hardware: Mapping[str, Any]


def slots(nodes: Iterable[Mapping[str, Any]], demand: Demand) -> dict[str, int]:
    """Node id -> shards that it trains at once, of the nodes alive; `nodes` as Ray lists them."""
    found = {}
    for node in nodes:
        if node["Alive"] and demand.kind in ("", _kind(node)):
            count = int(node["Resources"].get("CPU", 0))
            if demand.shards_per_gpu:
                gpus = int(node["Resources"].get("GPU", 0))
                count = min(count, gpus * demand.shards_per_gpu)
            if count:
                found[str(node["NodeID"])] = count
    return found


def bytes_per_slot(nodes: Iterable[Mapping[str, Any]], places: Mapping[str, int]) -> dict[str, int]:
    """Node id -> memory of the host for each shard that it trains, a tenth left alone."""
    memory = {node["NodeID"]: node["Resources"].get("memory", 0) for node in nodes}
    return {node: int(0.9 * memory[node] // count) for node, count in places.items()}


Limit = Callable[[Job, int], int]
"""How many models a worker with so many bytes of memory can train at once, 0 for none."""

MOST = 10**6
"""Models in a stack where memory sets no limit."""


def unlimited(job: Job, nbytes: int) -> int:
    """Whatever the caller's stacks hold."""
    return MOST


def models_that_fit(job: Job, nbytes: int) -> int:
    """As the planner reckons, with the images in the worker's own memory.

    A study that names its memory was planned with that, and is cut no further.
    """
    if job.study.resources.memory_gib:
        return MOST
    if nbytes <= 0:
        return 0
    height, width, channels = job.data.images_RHWC.shape[1:]
    study = dataclasses.replace(
        job.study,
        resources=dataclasses.replace(job.study.resources, memory_gib=nbytes / 2**30),
    )
    sizes = cost.Sizes(
        pool=len(next(iter(job.data.tables.values())).label_N),
        population=len(job.data.population_labels_Z),
        image=(height, width, channels),
        classes=job.data.classes,
        mapped=job.data.table is not None,
    )
    return cost.most_models(study, sizes, job.device)


class Offers:
    """The nodes alive: how many shards each trains at once, and how many models in one of them."""

    def __init__(self, demand: Demand, limit: Callable[[int], int]) -> None:
        self.demand = demand
        self.slots: dict[str, int] = {}
        self._limit, self._sizes = functools.cache(limit), dict[str, int]()
        self._small: set[str] = set()

    def see(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Note what Ray lists; nodes on which nothing fits are left out while there are others."""
        found = slots(nodes, self.demand)
        sizes = {node: self._limit(nbytes) for node, nbytes in bytes_per_slot(nodes, found).items()}
        fitting = {node: count for node, count in found.items() if sizes[node]}
        self.slots, self._sizes = fitting or found, sizes
        self._small = set(found) - set(self.slots)

    def by_size(self) -> dict[int, dict[str, int]]:
        """Models at once -> the nodes whose workers hold that many, with their shards at once."""
        found: dict[int, dict[str, int]] = {}
        for node, count in sorted(self.slots.items(), key=lambda item: -self._sizes[item[0]]):
            found.setdefault(self._sizes[node], {})[node] = count
        return found

    def labels(self, places: Iterable[str], avoided: Collection[str]) -> dict[str, str]:
        """The selector of a task for these nodes, which keeps off some."""
        kind, alive = self.demand.labels(), set(self.slots)
        if set(places) < alive:
            return {**kind, NODE: f"in({','.join(sorted(set(places) - set(avoided)))})"}
        off = sorted(alive & set(avoided) | self._small)
        return {**kind, NODE: f"!in({','.join(off)})"} if off else kind


def main_kind(nodes: Iterable[Mapping[str, Any]]) -> str:
    """The kind that most GPUs are of: models of one study are trained on one kind alone."""
    count: dict[str, float] = {}
    for node in nodes:
        if node["Alive"] and (gpus := node["Resources"].get("GPU", 0)):
            count[_kind(node)] = count.get(_kind(node), 0) + gpus
    return max(sorted(count), key=lambda kind: count[kind], default="")


def shards_per_gpu(processes: int | str, gpus: int) -> int:
    """One shard a GPU, unless more processes are asked for than there are GPUs.

    >>> [shards_per_gpu(processes, gpus=4) for processes in ("auto", 2, 4, 8, 9)]
    [1, 1, 1, 2, 3]
    """
    return 1 if isinstance(processes, str) else max(1, -(-processes // max(1, gpus)))


def bytes_per_shard(gpu_bytes: int, per_gpu: int) -> int:
    """Memory for one stack on a GPU that `per_gpu` processes share, a tenth left alone."""
    return int(0.9 * gpu_bytes / per_gpu) - (CONTEXT_BYTES if per_gpu > 1 else 0)


def _kind(node: Mapping[str, Any]) -> str:
    return str(node.get("Labels", {}).get(KIND, ""))


def survey(
    ray: Any,
    device: str,
    processes: int | str = "auto",
    ticket: ray_travel.Ticket | None = None,
) -> Survey:
    """Look at the cluster, and let one worker say what decides a model's bits there.

    Args:
        ray: the connected module.
        device: auto, cpu or cuda.
        processes: shards to be trained at once; only GPUs are shared for it.
        ticket: the sources that the worker must have, by default those of this process.

    Raises:
        ValueError: no node can train this study on that device, or none has the driver's sources.
        RuntimeError: no worker answered.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device '{device}': known are auto, cpu, cuda")
    if device == "cuda" and not gpus:
        raise ValueError(
            "device cuda was asked for, but Ray finds no GPU: add nodes that have one or use "
            "--device cpu"
        )
    device = "cuda" if gpus and device != "cpu" else "cpu"
    nodes = ray.nodes()
    demand = Demand() if device == "cpu" else _gpu_demand(nodes, processes)
    found = slots(nodes, demand)
    if not found:
        raise ValueError(
            "no node of the cluster has a CPU"
            + (" and a GPU" if device == "cuda" else "")
            + " to offer: start its nodes with --num-cpus above 0"
        )
    agreed = ticket or ray_travel.ticket(own_path=False)
    numerics, hardware, gpu_bytes = _ask_workers(ray, device, demand, agreed, set(found))
    largest = max(bytes_per_slot(nodes, found).values())
    on_gpu = bytes_per_shard(gpu_bytes, max(1, demand.shards_per_gpu))
    return Survey(
        device=device,
        demand=demand,
        nodes=len(found),
        slots=sum(found.values()),
        bytes_per_slot=on_gpu if device == "cuda" else largest,
        numerics=numerics,
        hardware=hardware,
    )


def _gpu_demand(nodes: Iterable[Mapping[str, Any]], processes: int | str) -> Demand:
    kind = main_kind(nodes)
    whole = slots(nodes, Demand(shards_per_gpu=1, kind=kind))
    return Demand(shards_per_gpu=shards_per_gpu(processes, sum(whole.values())), kind=kind)


def launcher(ray: Any, ticket: ray_travel.Ticket, function: str, *last: Any) -> Any:
    """`ray_travel.launch` as a task that takes the first argument of `function`, pickled.

    last: the others. What is in `ray_travel` travels by value.
    """
    ray.cloudpickle.register_pickle_by_value(ray_travel)
    pickled = map(ray.cloudpickle.dumps, last)
    return ray.remote(ray_travel.launching(tuple(ticket), function, *pickled))


def _ask_workers(
    ray: Any, device: str, demand: Demand, ticket: ray_travel.Ticket, nodes: Collection[str]
) -> Any:
    """The facts of the first of these nodes that has the driver's sources."""
    refused: dict[str, str] = {}
    while True:
        off = {NODE: f"!in({','.join(sorted(refused))})"} if refused else {}
        answer = _ask_worker(ray, device, demand, ticket, off)
        if type(answer) is not dict:
            return answer
        refused[answer["node"]] = answer["refused"]
        if set(nodes) <= set(refused) or len(refused) > len(nodes):
            sentence = answer["refused"]
            raise ValueError(f"no node of the cluster can train this study: of one, {sentence}")


def _ask_worker(
    ray: Any, device: str, demand: Demand, ticket: ray_travel.Ticket, off: Mapping[str, str]
) -> Any:
    labels = {**demand.labels(), **off}
    options = {**demand.resources(), "label_selector": labels, "max_retries": 1}
    facts = launcher(ray, ticket, f"{__name__}:{_facts.__name__}")
    asked = facts.options(**options).remote(ray.cloudpickle.dumps(device))
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
