"""Planted bugs: each must be caught by a tier. Run on request; rows in bench/results/mutants.csv.

    python tests/kernels/triton/mutants.py [NAME …]

A mutant is one textual change in a copy of kernels/; the checks named beside it then run on the
copy, in the interpreter or through the compiler. A mutant that passes them is a hole in the proof.
"""

import csv
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RESULT = ROOT / "bench" / "results" / "mutants.csv"
BN, GN = "kernels/batch_norm/triton_passes.py", "kernels/group_norm/triton_passes.py"
CE, SGD = "kernels/cross_entropy/triton.py", "kernels/sgd/triton.py"
POOL = "kernels/batch_norm/triton_pool.py"
AUGMENT, NORMS = "kernels/augment/triton.py", "kernels/grad_norm/triton_passes.py"
NUMBERS = "test_outputs_and_gradients_equal_float64_autograd"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug: where, which text becomes which (at its nth place), and who must notice."""

    name: str
    file: str
    old: str
    new: str
    check: str
    place: int = 0


MUTANTS = [
    Mutant("a lost load mask", BN, "x = tl.load(x_ptr + base + i * C + tile, mask=mask, other=0.0)",
           "x = tl.load(x_ptr + base + i * C + tile)", f"check_batch_norm.py::{NUMBERS}[plain]"),
    Mutant("a lost store mask", BN, "y.to(y_ptr.dtype.element_ty), mask=mask)",
           "y.to(y_ptr.dtype.element_ty))", f"check_batch_norm.py::{NUMBERS}[plain]"),
    Mutant("a load without other", BN, "dz = tl.load(dy_ptr + at, mask=mask, other=0.0)",
           "dz = tl.load(dy_ptr + at, mask=mask)", f"check_batch_norm.py::{NUMBERS}[plain]"),
    Mutant("a wrong stride", BN, "tile = lane[:, None] * C + col[None, :]",
           "tile = lane[:, None] * COLS + col[None, :]", f"check_batch_norm.py::{NUMBERS}[relu]"),
    Mutant("overlapping chunks", BN, "start = chunk * CHUNK\n    base = model * pitch",
           "start = chunk * (CHUNK - 1)\n    base = model * pitch",
           f"check_batch_norm.py::{NUMBERS}[relu]"),
    Mutant("a neighbour's weight", BN, "weight_ptr + model * weight_pitch + col, mask=inside",
           "weight_ptr + (model ^ 1) % 3 * weight_pitch + col, mask=inside",
           f"check_batch_norm.py::{NUMBERS}[relu]"),
    Mutant("memory read twice", BN, "        if RESIDUAL:\n            y += ",
           "        y += 0 * tl.load(x_ptr + base + i * C + tile, mask=mask, other=0.0)\n"
           "        if RESIDUAL:\n            y += ",
           "check_batch_norm.py::test_bytes_moved_are_exactly_those_of_the_formula"),
    Mutant("a 32-bit index", BN,
           "model = tl.cast(tl.program_id(2) + first, tl.int64)\n    if (chunk",
           "model = tl.program_id(2) + first\n    if (chunk",
           "check_batch_norm.py::test_index_arithmetic_holds_beyond_two_to_the_31_elements"),
    Mutant("an unshifted variance", BN, "shift = tl.sum(x, 0) /", "shift = 0.0 * tl.sum(x, 0) /",
           "check_batch_norm.py::test_a_large_mean_does_not_cost_the_variance"),
    Mutant("chunks merged without their means", BN, "spread + away * away * weight", "spread",
           f"check_batch_norm.py::{NUMBERS}[relu]"),
    Mutant("a penalty of the wrong sign", BN, "along -= slope", "along += slope",
           f"check_batch_norm.py::{NUMBERS}[hinge penalty]"),
    Mutant("a mask without beta", BN, "+ shift[None, None, :] <= 0", "<= 0",
           f"check_batch_norm.py::{NUMBERS}[relu]"),
    Mutant("norms of one block of channels", BN, "for j in range(0, C, COLS):",
           "for j in range(0, COLS, COLS):", f"check_batch_norm.py::{NUMBERS}[norms over blocks]"),
    Mutant("a lost update between samples", GN, "(model * samples + sample) * (2 * C)",
           "(model * samples) * (2 * C)",
           "check_group_norm.py::test_output_and_gradients_equal_float64_autograd[relu]"),
    Mutant("channels of a neighbouring group", GN, "(lane // SIZE)[None, :]",
           "((lane + 1) // SIZE)[None, :]",
           "check_group_norm.py::test_output_and_gradients_equal_float64_autograd[relu]"),
    Mutant("a sum in bfloat16", GN,
           "x = tl.load(x_ptr + base + tile, mask=mask, other=0.0).to(tl.float32)",
           "x = tl.load(x_ptr + base + tile, mask=mask, other=0.0)",
           "check_group_norm.py::test_bfloat16_equals_the_rounded_reference[relu]"),
    Mutant("a lost last block", SGD, "starts.append(starts[-1] + -(-count // BLOCK))",
           "starts.append(starts[-1] + max(1, count // BLOCK))", "check_sgd.py"),
    Mutant("weight decay for all", SGD, "if DECAYED:", "if True:", "check_sgd.py"),
    Mutant("a 32-bit model in cross-entropy", CE,
           "model = tl.cast(tl.program_id(1), tl.int64)\n    row = tl.program_id(0) * ROWS "
           "+ tl.arange(0, ROWS)\n    col = tl.arange(0, COLS)\n    here",
           "model = tl.program_id(1)\n    row = tl.program_id(0) * ROWS "
           "+ tl.arange(0, ROWS)\n    col = tl.arange(0, COLS)\n    here",
           "check_far_models.py -k cross_entropy"),
    Mutant("a 32-bit model in gradient norms", NORMS,
           "model = tl.cast(tl.program_id(2), tl.int64)", "model = tl.program_id(2)",
           "check_far_models.py -k conv_norms"),
    Mutant("the last of equals wins", POOL, "takes = (value > best)", "takes = (value >= best)",
           "check_batch_norm_pool.py::test_it_equals_norm_and_pooling_one_after_the_other"),
    Mutant("windows over the border", POOL, "mask=right & below, other=0.0).to(tl.float32)",
           "mask=here, other=0.0).to(tl.float32)",
           f"check_batch_norm_pool.py::{NUMBERS}[odd images]"),
    Mutant("a saturating confidence", CE, "miss = 1.0 / (1.0 + tl.exp(phi))",
           "miss = 1.0 - 1.0 / (1.0 + tl.exp(-phi))",
           "check_cross_entropy.py::test_confident_samples_keep_their_relative_accuracy"),
    Mutant("another word for the flip", AUGMENT, "(word2 & 1) == 1", "(word3 & 1) == 1",
           "check_augment.py"),
    Mutant("a border repeated by reflection", AUGMENT, "2 * (SIZE - 1) - position",
           "2 * SIZE - 1 - position", "check_augment.py"),
    Mutant("pairs counted once", NORMS, "2.0 * total", "total", "check_grad_norm.py -k small"),
    Mutant("an atomic sum", NORMS, "tl.store(part_ptr + at, total)",
           "tl.atomic_add(part_ptr + at, total)", "aot grad_norm"),
    Mutant("a tile that spills", "kernels/_launch.py", "TILE = 2048", "TILE = 16384",
           "aot batch_norm"),
]  # fmt: skip


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the kernels and their checks with the bug in it."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=skip)
    shutil.copytree(HERE, folder / "tests" / "kernels" / "triton", ignore=skip)
    shutil.copy(ROOT / "tests" / "tolerances.py", folder / "tests")
    path = folder / mutant.file
    text = path.read_text()
    parts = text.split(mutant.old)
    if len(parts) < 2 + mutant.place:
        raise ValueError(f"{mutant.name}: {mutant.file} does not hold {mutant.old!r}")
    head = mutant.old.join(parts[: mutant.place + 1])
    path.write_text(head + mutant.new + mutant.old.join(parts[mutant.place + 1 :]))


def run(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Whether the check noticed, and its last word."""
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "KERNEL_TIER": "interpret"}
    here = folder / "tests" / "kernels" / "triton"
    if mutant.check.startswith("aot"):
        variables |= {"TRITON_CACHE_DIR": str(folder / "cache")}
        command = [str(here / "aot.py"), *mutant.check.split()[1:], "--targets", "sm_90", "--hold"]
    else:
        variables |= {"TRITON_INTERPRET": "1"}
        path, *options = mutant.check.split(" -k ")
        options = ["-k", *options] if options else []
        command = ["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header",
                   str(here / "checks" / path), *options]  # fmt: skip
    done = subprocess.run([sys.executable, *command], env=os.environ | variables, cwd=folder,
                          capture_output=True, text=True)  # fmt: skip
    said = re.findall(r"^E +(.*\S)", done.stdout, re.M) or done.stderr.strip().splitlines()
    return done.returncode != 0, said[0][:160] if said else ""


def keep(names: list[str], rows: list[dict[str, object]]) -> None:
    """Write the rows in the order of the list, over those of earlier runs."""
    earlier = list(csv.DictReader(RESULT.open())) if RESULT.exists() else []
    by_name = {row["mutant"]: row for row in [*earlier, *rows]}
    with RESULT.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(by_name[name] for name in names if name in by_name)


def main() -> None:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    rows = []
    for mutant in chosen:
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            plant(mutant, Path(folder))
            caught, said = run(mutant, Path(folder))
        tier = "compile" if mutant.check.startswith("aot") else "interpreter"
        rows.append({"mutant": mutant.name, "file": mutant.file, "tier": tier,
                     "check": mutant.check, "caught": caught, "said": said})  # fmt: skip
        print(f"{'caught  ' if caught else 'SURVIVED'} {mutant.name}: {said} "
              f"({time.time() - start:.0f} s)", flush=True)  # fmt: skip
    keep([m.name for m in MUTANTS], rows)
    sys.exit(not all(row["caught"] for row in rows))


if __name__ == "__main__":
    main()
