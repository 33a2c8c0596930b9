"""Registered ops over stacked tensors.

Each op takes one model's tensors, also inside `torch.func.vmap` over models; differentiate outside
vmap with `torch.autograd.grad`. How an op is registered, and how an implementation is chosen for
it, stands in `kernels._register`.
"""

from kernels import grad_norm, sgd
from kernels._explain import Explanation, explain
from kernels._layout import laid_out
from kernels._process import keep_memory, prepare
from kernels._register import adopt, plan
from kernels.affine import affine, relu
from kernels.augment import augment, view
from kernels.batch_norm import BatchNormOut, PenaltyForm, batch_norm
from kernels.concat import concat
from kernels.conv import conv2d
from kernels.cross_entropy import cross_entropy, cross_entropy_phi
from kernels.group_norm import group_norm
from kernels.linear import linear
from kernels.pool import avg_pool, global_avg_pool, max_pool

__all__ = [
    "BatchNormOut",
    "Explanation",
    "PenaltyForm",
    "adopt",
    "affine",
    "augment",
    "avg_pool",
    "batch_norm",
    "concat",
    "conv2d",
    "cross_entropy",
    "cross_entropy_phi",
    "explain",
    "global_avg_pool",
    "grad_norm",
    "group_norm",
    "keep_memory",
    "laid_out",
    "linear",
    "max_pool",
    "plan",
    "prepare",
    "relu",
    "sgd",
    "view",
]
