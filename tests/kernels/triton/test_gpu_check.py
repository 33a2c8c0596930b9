"""The script for the day a GPU is there runs here too, on tiny shapes; without one it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


ABSENT = ("scipy", "sklearn", "safetensors", "typer", "rich", "tomli_w", "ray", "ffcv",
          "torchvision", "matplotlib", "pyarrow", "PIL", "cv2")  # fmt: skip
"""The script needs torch, triton and numpy alone (numba serves where it runs on a CPU)."""


def run(*arguments):
    code = (
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"sys.argv = ['bench/gpu_check.py', *{arguments}]\n"
        "runpy.run_path('bench/gpu_check.py', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_dry_run_checks_then_times_and_prints_its_table_last():
    done = run("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    checked, timed = lines.index("correctness"), lines.index("timing")
    said = "".join(lines[checked:timed])
    assert "batch_norm_backward float32: right, and the same alone and once more" in said
    assert "a whole net: the same compiled and once more" in said
    head = next(i for i, line in enumerate(lines) if line.startswith("what "))
    assert head > timed
    for what in ("batch_norm", "group_norm", "batch_norm with pooling", "group_norm with pooling",
                 "conv2d", "conv_norms", "sgd", "cross_entropy_phi",
                 "augment", "training step of resnet8"):  # fmt: skip
        assert any(line.startswith(what) for line in lines[head + 1 :]), what
    rivals = [line for line in lines[head + 1 :] if line.startswith("training step")]
    for shape in ("one net, a CUDA graph", "2 processes", "M=2", "M=2, a CUDA graph"):
        assert any(shape in line for line in rivals), shape
    assert any("plain vmap" in line for line in rivals)
    assert not any("nan" in line for line in rivals)
    assert sum(line.startswith("G1 ") for line in lines) == 1
    assert sum(line.startswith("G3 ") for line in lines) == 1


def test_gates_are_judged_by_their_rows():
    from bench.gpu_check import FULL_NORM, GRAPH, gates
    from bench.gpu_rows import Row

    def rows(floor, extra, rival):
        return [
            Row("batch_norm", "8x128", "float32", 1.0, floor, "cuDNN", 2.0),
            Row(FULL_NORM, "8x128", "float32", 1.0 + extra, floor, "cuDNN", 2.0),
            Row("training step of resnet9, a model", "M=8", "float32", 1e-3, 5e-4, GRAPH, rival),
        ]

    nets_an_hour = 3600 / (1e-3 * 195 * 24)
    (one, three) = gates(rows(0.8, 0.04, 2e-3), 128)
    assert one.startswith(f"G1 held: the best stack (M=8) makes {nets_an_hour:.0f} nets")
    assert three.startswith("G3 held at 8x128 float32: 80% of the copy speed")
    assert gates(rows(0.7, 0.04, 2e-3), 128)[1].startswith("G3 not held")
    assert gates(rows(0.8, 0.06, 2e-3), 128)[1].startswith("G3 not held")
    assert gates(rows(0.8, 0.04, 5e-4), 128)[0].startswith("G1 not held")
    assert gates([], 128) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the script would run")
def test_without_a_gpu_it_says_what_to_do():
    done = run()
    assert done.returncode == 1
    assert "no GPU here: --dry-run tries the script on a CPU" in done.stderr
