"""The script for the day a GPU is there runs here too, on tiny shapes; without one it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "bench/gpu_check.py", *arguments],
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
    assert "batch_norm_backward float32: right" in "".join(lines[checked:timed])
    head = next(i for i, line in enumerate(lines) if line.startswith("what "))
    assert head > timed
    for what in ("batch_norm", "group_norm", "conv2d", "conv_norms", "sgd", "cross_entropy_phi",
                 "augment", "training step of resnet8"):  # fmt: skip
        assert any(line.startswith(what) for line in lines[head + 1 :]), what


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the script would run")
def test_without_a_gpu_it_says_what_to_do():
    done = run()
    assert done.returncode == 1
    assert "no GPU here: --dry-run tries the script on a CPU" in done.stderr
