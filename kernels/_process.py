"""What a process that trains stacks does once at its start; nothing here changes a number."""

import ctypes
import sys

import torch

import kernels

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER, _STEP = 2**31 - 1, 64 * 2**20


def keep_memory() -> bool:
    """Let glibc's malloc keep freed memory for the next step; True where that was possible.

    Blocks of 32 MiB and more are otherwise mapped anew at every allocation, and every page of
    them costs a fault: activations of a stack are that large, and zeroing them takes longer than
    batch norm does. The process keeps its peak until it ends, so this is for workers; the first
    steps still fault, until malloc's bins have settled.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _STEP))
    done = [mallopt(option, value) == 1 for option, value in wanted]
    return all(done)


def prepare() -> None:
    """Compile every CPU loop, or load it from the cache: half a minute once, then a second.

    Call it where several workers would otherwise compile the same loops at the same time.
    """
    x, gamma = torch.ones(1, 2, 12, 4, 4), torch.ones(1, 12)
    inputs = [x.requires_grad_(), gamma.requires_grad_()]
    torch.autograd.grad(torch.func.vmap(_everything)(*inputs).sum(), inputs)
    lr = torch.zeros(1)
    one = {"w": torch.ones(1, 2)}
    kernels.sgd.step(one, one, {"w": torch.zeros(1, 2)}, lr, lr)
    images, index = torch.zeros(1, 4, 4, 1, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int64)
    kernels.augment(images, index, index, index[0], [0.0], [1.0])


def _everything(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    form = kernels.PenaltyForm(form="square")
    out = kernels.batch_norm(x, gamma, gamma, None, None, training=True, penalty=form)
    h = kernels.affine(out.y, gamma, gamma, relu=True, residual=x)
    h = kernels.group_norm(kernels.avg_pool(h) + kernels.max_pool(x), 1, gamma, gamma)
    labels = torch.zeros(x.shape[0], dtype=torch.int64)
    loss = kernels.cross_entropy(kernels.global_avg_pool(h), labels).sum()
    assert out.penalty is not None
    return loss + out.penalty
