"""Compiles kernels ahead of time through their real launchers, for a GPU that is not there.

`compiling(target)` puts a stub driver in place and turns every launch into a compilation: true
argument hints, true specialisation, true grids, on CPU tensors that are never read. `measure` reads
registers, spills, shared memory and access widths from the machine code. Runs in a process of its
own, without the interpreter.
"""

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Driver:
    """Answers what the launcher asks a driver before it launches."""

    def __init__(self, name):
        self.target = TARGETS[name]
        self.number = list(TARGETS).index(name)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return "cpu"


@dataclasses.dataclass
class Compiled:
    """One compiled kernel and the grid it would be launched on."""

    name: str
    grid: tuple[int, ...]
    kernel: object


@contextlib.contextmanager
def compiling(target_name):
    """Within, launches compile for the target and are listed in the yielded list."""
    found: list[Compiled] = []
    seen = set()
    plain = JITFunction.run

    def run(self, *args, grid, warmup=False, **kwargs):
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            found.append(Compiled(self.fn.__name__, tuple(grid), kernel))
        return kernel

    driver.set_active(_Driver(target_name))
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = plain


def measure(compiled, target_name):
    """A row of figures for one compiled kernel."""
    kernel = compiled.kernel
    warps = kernel.metadata.num_warps
    row = {
        "kernel": compiled.name,
        "target": target_name,
        "triton": triton.__version__,
        "warps": warps,
        "shared": kernel.metadata.shared,
    }
    if target_name.startswith("sm"):
        row |= _nvidia(kernel)
        row["occupancy"] = _nvidia_occupancy(row)
        row["float_atomics"] = len(
            re.findall(r"\b(?:atom|red)\.\S*\.(?:f|bf)\d+", kernel.asm["ptx"])
        )
    else:
        row |= _amd(kernel.asm["amdgcn"])
        row["occupancy"] = _amd_occupancy(row)
        row["float_atomics"] = len(
            re.findall(r"atomic_(?:pk_)?add_(?:f|bf)\d+", kernel.asm["amdgcn"])
        )
    return row


def _nvidia(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _dump("-res-usage", file.name)
        code = _dump("-sass", file.name)
    figures = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    loads = Counter(_width(op) for op in re.findall(r"\bLDG(?:STS)?\.E[.\w]*", code))
    stores = Counter(_width(op) for op in re.findall(r"\bSTG\.E[.\w]*", code))
    return {
        "registers": int(figures["REG"]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "stack": int(figures["STACK"]),
        "loads": dict(loads),
        "stores": dict(stores),
    }


def _dump(flag, path):
    command = [str(_TOOLS / "cuobjdump"), flag, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _width(op):
    for part, bits in ((".128", 128), (".64", 64), (".U16", 16), (".S16", 16), (".U8", 8)):
        if part in op:
            return bits
    return 32


def _amd(code):
    def number(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])

    widths = {"dwordx4": 128, "dwordx2": 64, "dword": 32, "ushort": 16, "short": 16, "ubyte": 8}

    def count(kind):
        ops = re.findall(rf"(?:global|buffer|flat)_{kind}_(\w+)", code)
        names = [o.replace("short_d16_hi", "short").replace("short_d16", "short") for o in ops]
        return dict(Counter(widths.get(n, 8 if "byte" in n else 16) for n in names))

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
        "loads": count("load"),
        "stores": count("store"),
    }


def _nvidia_occupancy(row):
    """Warps resident on an SM, as a share of 64."""
    per_warp = -(-row["registers"] * 32 // 256) * 256
    blocks = 65536 // (per_warp * row["warps"])
    if row["shared"]:
        blocks = min(blocks, SHARED_LIMIT[row["target"]] // (row["shared"] + 1024))
    return min(64, min(blocks, 32) * row["warps"]) / 64


def _amd_occupancy(row):
    """Waves resident on a SIMD, as a share of 8."""
    waves = min(8, 512 // max(64, -(-row["registers"] // 8) * 8))
    if row["shared"]:
        waves = min(waves, 65536 // row["shared"] * row["warps"] // 4)
    return waves / 8


LEAST_OCCUPANCY = 0.25
"""Resident warps or waves, as a share of what fits: enough, with wide loads, to fill memory."""

LEAST_OCCUPANCY_OF_PRODUCTS = 0.125
"""The same for kernels that multiply tiles: those keep their work in registers instead."""

LEAST_WIDE = 0.5
"""Of the bits that a kernel's instructions load or store, the share in 128-bit accesses; the rest
are vectors of a number a channel."""


def _share(accesses):
    bits = {int(width): int(width) * count for width, count in accesses.items()}
    return bits.get(128, 0) / max(1, sum(bits.values()))


PRODUCTS = ("gram", "square")


def faults(row):
    """What is wrong with a row, in one sentence, or nothing."""
    where = f"{row['op']} {row['shape']} {row['dtype']} {row['kernel']} on {row['target']}"
    narrow = [kind for kind in row["wide"] if _share(row[kind]) < LEAST_WIDE]
    least = LEAST_OCCUPANCY_OF_PRODUCTS if row["kernel"] in PRODUCTS else LEAST_OCCUPANCY
    problems = {
        f"{row['spills']} spills": row["spills"] > 0,
        f"{row['stack']} bytes of stack": row["stack"] > 0,
        f"{row['shared']} bytes of shared memory": row["shared"] > SHARED_LIMIT[row["target"]],
        f"{row['float_atomics']} float atomics": row["float_atomics"] > 0,
        f"occupancy {row['occupancy']}": row["occupancy"] < least,
        f"{' and '.join(narrow)} mostly narrower than 128 bits": bool(narrow),
    }
    found = [problem for problem, there in problems.items() if there]
    return f"{where}: {', '.join(found)}" if found else ""
