"""What gpu_check measures with: a clock, CUDA graphs, rows and their table."""

import csv
import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measurement: median seconds, and what it is compared with."""

    what: str
    shape: str
    dtype: str
    seconds: float
    floor_seconds: float = float("nan")
    rival: str = ""
    rival_seconds: float = float("nan")

    def share(self) -> str:
        """Floor ÷ time: 1 is as fast as memory."""
        known = self.floor_seconds == self.floor_seconds
        return f"{self.floor_seconds / self.seconds:.2f}" if known else ""

    def gain(self) -> str:
        """Rival ÷ time: above 1 is faster than the rival."""
        return f"{self.rival_seconds / self.seconds:.2f}" if self.rival else ""


@dataclass(frozen=True)
class Bench:
    """Where and how large; `processes` and `vmapped`: how many models G1's rivals train at once."""

    device: str
    models: int
    batch: int
    layers: tuple[tuple[int, int], ...]
    repeats: int
    deadline: float
    processes: tuple[int, ...]
    process_seconds: float
    vmapped: tuple[int, ...]

    def time(self, call: Call) -> float:
        """Median seconds of a call, by the device's own clock, after a warm-up."""
        for _ in range(min(3, self.repeats)):
            call()
        if self.device == "cpu":
            return statistics.median(self._wall(call) for _ in range(self.repeats))
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
        return statistics.median(times)

    @staticmethod
    def _wall(call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def left(self) -> bool:
        """Whether there is time for another measurement."""
        return time.monotonic() < self.deadline

    def captured(self, call: Call) -> Call:
        """The call as one CUDA graph: without Python between the kernels."""
        if self.device == "cpu":
            return call
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def table(rows: list[Row]) -> str:
    """The rows as text, one a line."""
    head = f"{'what':38} {'shape':22} {'dtype':9} {'ms':>9} {'of floor':>8} {'x rival':>8}  rival"
    lines = [
        f"{r.what:38} {r.shape:22} {r.dtype:9} {r.seconds * 1e3:9.3f} {r.share():>8} "
        f"{r.gain():>8}  {r.rival}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def save(rows: list[Row]) -> Path:
    """Rows with the GPU and the versions they were measured on."""
    import triton

    path = Path(__file__).resolve().parent / "results" / "gpu_check.csv"
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
             "triton": triton.__version__, "date": str(datetime.date.today())}  # fmt: skip
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, [*names, *where], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) | where for row in rows)
    return path
