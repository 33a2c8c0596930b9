"""Bytes that interpreted kernels move, over the floor of a perfect implementation: JSON rows.

TRITON_INTERPRET=1 python tests/kernels/triton/moved.py
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "checks"), str(HERE), str(HERE.parents[2])]

import check_batch_norm  # noqa: E402
import check_cross_entropy  # noqa: E402
import check_group_norm  # noqa: E402
import check_group_norm_pool  # noqa: E402
import check_sgd  # noqa: E402
from triton_case import Tracer, kernels, noise  # noqa: E402


def report(op, shape, dtype, floor, call):
    with Tracer() as trace:
        call()
    row = {"op": op, "shape": shape, "dtype": str(dtype).removeprefix("torch."), "floor": floor}
    print(json.dumps(row | {"moved": trace.moved(), "ratio": trace.moved() / floor}), flush=True)


def pooled(channels, dtype):
    """Norm, ReLU and max-pool in one op: 5¾ activations."""
    name = f"4x16x16x{channels}"
    inputs, weights, options = check_batch_norm.case(
        1, 4, channels, 16, 16, dtype=dtype, relu=True, pool=2
    )
    floor = 23 * inputs[0].numel() * inputs[0].element_size() // 4
    report("batch_norm with pooling", name, dtype, floor,
           lambda: check_batch_norm.apply(inputs, weights, options))  # fmt: skip
    grouped, _, rest = check_group_norm.case(1, 4, channels, 16, 16, 8, dtype=dtype, relu=True)
    slope = [noise(1, 4, channels, 8, 8, seed=7, dtype=dtype)]
    report("group_norm with pooling", name, dtype, floor,
           lambda: check_group_norm_pool.apply(grouped[:3], slope, rest))  # fmt: skip


def main():
    for dtype in (torch.float32, torch.bfloat16):
        for channels in (32, 64):
            for residual in (False, True):
                name = f"4x16x16x{channels}{' residual' if residual else ''}"
                inputs, weights, options = check_batch_norm.case(
                    1, 4, channels, 16, 16, dtype=dtype, relu=True, residual=residual
                )
                floor = check_batch_norm.floors(inputs, options)
                report("batch_norm forward and backward", name, dtype, floor,
                       lambda a=(inputs, weights, options): check_batch_norm.apply(*a))  # fmt: skip
                inputs, weights, options = check_group_norm.case(
                    1, 4, channels, 16, 16, 8, dtype=dtype, relu=True, residual=residual
                )
                floor = (8 + 3 * residual) * inputs[0].numel() * inputs[0].element_size()
                report("group_norm forward and backward", name, dtype, floor,
                       lambda a=(inputs, weights, options): check_group_norm.apply(*a))  # fmt: skip
            pooled(channels, dtype)
        logits, labels, _ = check_cross_entropy.case(2, 32, 100, dtype)
        floor = 2 * logits.numel() * logits.element_size() + labels.numel() * 16
        one_pass = torch.func.vmap(kernels.cross_entropy_phi)
        report("cross_entropy_phi", "2x32x100", dtype, floor,
               lambda a=(logits, labels), f=one_pass: f(*a))  # fmt: skip
    shapes = {"a": (64, 32, 3, 3), "b": (64,), "c": (10, 64)}
    stacks = [check_sgd.state(2, shapes, seed) for seed in (0, 5, 9)]
    floor = 5 * 4 * sum(v.numel() for v in stacks[0].values())
    report("sgd", "2x19136", torch.float32, floor,
           lambda: kernels.sgd.step(*stacks, *check_sgd.rates(2)))  # fmt: skip


if __name__ == "__main__":
    main()
