"""Loops compiled in a process and loops loaded from the cache give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, sys, torch
torch.set_num_threads(1)
from engine.plan import ModelRef
from engine.prepare import prepare
from engine.studyfile import load_study
from engine.train import run_stack
changes = ["data.loader=resident", "data.limit=200", "train.epochs=1", "models=2"]
norms = ["arms.group.net=lenet", "arms.group.norm=group", "arms.affine.net=lenet"]
study = load_study("digits_bn_vs_nobn", [*changes, *norms, "arms.affine.norm=affine"])
data = prepare(study).data
for arm in study.arms:
    (result,) = run_stack(study, [ModelRef(mix="flip5", arm=arm, model_id=0)], data, "cpu", id)
    hashed = hashlib.sha256()
    for name in sorted(result.arrays):
        hashed.update(result.arrays[name].tobytes())
    print(arm, hashed.hexdigest())
"""


def results(cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_cold_and_a_warm_cache_train_the_same_models(tmp_path):
    cold, warm = results(tmp_path), results(tmp_path)
    assert len(cold.splitlines()) == 5
    assert cold == warm
    assert list(tmp_path.rglob("*.nbc")), "nothing was cached, so nothing was compared"
