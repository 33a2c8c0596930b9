"""What a worker does at its start: keeping memory, preparing compiled loops."""

import subprocess
import sys

KEEP = """
import resource, torch, kernels

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(10 * 2**20).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
assert faults() > 5000, "glibc maps 40 MiB anew"
assert kernels.keep_memory()
settled = [faults() for _ in range(64)]
assert max(settled[-8:]) < 100, settled
"""

PREPARE = """
import torch, kernels
from numba.core import event

kernels.prepare()
with event.install_recorder("numba:compile") as seen:
    kernels.prepare()
    x = torch.randn(3, 5, 6, 7, 7)
    weight = torch.ones(3, 6)
    y = torch.func.vmap(
        lambda x, w: kernels.batch_norm(x, w, None, None, None, training=True, relu=True).y
    )(x.requires_grad_(), weight)
    torch.func.vmap(kernels.max_pool)(y).sum().backward()
assert not seen.buffer, seen.buffer
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_is_kept_from_step_to_step():
    run(KEEP)


def test_nothing_is_compiled_after_prepare():
    run(PREPARE)
