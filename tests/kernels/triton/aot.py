"""Compiles every kernel through its launcher and prints one JSON row per kernel and target.

    python tests/kernels/triton/aot.py [OP …] [--targets sm_90,…]

`PYTHONPATH` decides which triton is used; `TRITON_CACHE_DIR` must be a folder of its own.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[3])]

from triton_stub import TARGETS, compiling, faults, measure  # noqa: E402

from kernels import _layout  # noqa: E402

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS = {"64x32x32": (64, 32, 32), "512x4x4": (512, 4, 4)}
MODELS, BATCH = 8, 128
WIDE = {
    "loads": ("statistics", "reduce", "reduce_pooled", "linear"),
    "both": ("apply", "apply_backward", "apply_pooled", "apply_backward_pooled", "forward",
             "backward", "forward_pooled", "backward_pooled", "update_all"),
}  # fmt: skip
"""What must go through 128-bit accesses, by kernel."""


def wide(kernel, shape, dtype, target):
    """The same, where the shape allows it."""
    if kernel.endswith("ward_pooled") and (shape, dtype, target) == ("512x4x4", "bf16", "gfx942"):
        return ()  # a sample's 4 windows of 64 channels are 4 numbers for each of a wave's 64 lanes
    if (kernel, shape) == ("scale", "128 classes") or kernel in WIDE["both"]:
        return "loads", "stores"
    products = kernel in ("gram", "square") and shape == "64x32x32"  # 4x4: a tile of 16 positions
    rows = (kernel, shape) == ("entropy", "128 classes")  # 10 classes: rows of 40 or 20 bytes
    return ("loads",) if products or rows or kernel in WIDE["loads"] else ()


def activation(layer, dtype):
    channels, height, width = layer
    like = torch.empty(0, dtype=dtype)
    return _layout.empty_activation(like, MODELS, (BATCH, channels, height, width))


def batch_norm(layer, dtype):
    from kernels.batch_norm import triton as launchers

    x, residual, dy, y, dx, dz = (activation(layer, dtype) for _ in range(6))
    vector = lambda: torch.ones(MODELS, 16 * -(-layer[0] // 16))[:, : layer[0]]  # noqa: E731
    weight, bias, mean, var, dweight, dbias = (vector() for _ in range(6))
    penalty = torch.ones(MODELS, 16)[:, 0]
    norms = torch.ones(MODELS, BATCH)
    statistics = (mean, var)
    for add, running in ((None, (None, None)), (residual, statistics)):
        launchers.batch_norm(
            (y, mean, var, penalty), x, weight, bias, *running, add, None, 1e-5, True, "hinge", 1.0,
            True,
        )  # fmt: skip
    for added, training, probe in ((0, 1, 0), (1, 1, 1), (0, 0, 1)):
        launchers.batch_norm_backward(
            (dx, dweight, dbias, dz, norms), dy, penalty, x, weight, mean, var, y, bool(training),
            1e-5, "hinge", 1.0, True, True, True, bool(added), bool(probe), bias, bool(added),
        )  # fmt: skip

    batch_norm_pool(layer, dtype, (x, dx), (weight, bias, mean, var, dweight, dbias))


def batch_norm_pool(layer, dtype, activations, vectors):
    from kernels.batch_norm import triton as launchers

    channels, height, width = layer
    (x, dx), (weight, bias, mean, var, dweight, dbias) = activations, vectors
    y, dy = (activation((channels, height // 2, width // 2), dtype) for _ in range(2))
    penalty, norms = torch.ones(MODELS, 16)[:, 0], torch.ones(MODELS, BATCH)
    static = (1e-5, True, "hinge", 1.0, True)
    for running in ((None, None), (mean, var)):
        launchers.batch_norm_pool((y, mean, var, penalty), x, weight, bias, *running, None, *static)
    for training, probe in ((True, True), (False, False)):
        launchers.batch_norm_pool_backward(
            (dx, dweight, dbias, norms), dy, penalty, x, weight, bias, mean, var, training,
            *static, True, True, probe,
        )  # fmt: skip


def group_norm(layer, dtype):
    from kernels.group_norm import triton as launchers

    x, residual, dy, y, dx, dz = (activation(layer, dtype) for _ in range(6))
    weight, bias, dweight, dbias = (torch.ones(MODELS, layer[0]) for _ in range(4))
    mean, sigma = (torch.ones(MODELS, BATCH, 8) for _ in range(2))
    launchers.group_norm((y, mean, sigma), x, weight, bias, residual, 8, 1e-5, True)
    for added in (False, True):
        launchers.group_norm_backward(
            (dx, dweight, dbias, dz), dy, x, weight, mean, sigma, y, 8, True, added, bias, added
        )

    channels, height, width = layer
    y, dy = (activation((channels, height // 2, width // 2), dtype) for _ in range(2))
    static = (8, 1e-5, True)
    launchers.group_norm_pool((y, mean, sigma), x, weight, bias, *static)
    launchers.group_norm_pool_backward(
        (dx, dweight, dbias), dy, x, weight, bias, mean, sigma, *static, True
    )


def cross_entropy(classes, dtype):
    from kernels.cross_entropy import triton as launchers

    logits, share = (torch.empty(MODELS, BATCH, classes, dtype=dtype) for _ in range(2))
    loss, phi, grad = (torch.empty(MODELS, BATCH) for _ in range(3))
    labels = torch.zeros(MODELS, BATCH, dtype=torch.int64)
    launchers.cross_entropy((loss,), logits, labels)
    launchers.cross_entropy_backward((share,), grad, logits, labels)
    launchers.cross_entropy_phi((loss, phi, share), logits, labels)
    launchers.cross_entropy_phi_backward((share,), grad, share)


def sgd(shapes, dtype):
    from kernels.sgd import triton as launchers

    stacks = {str(i): torch.empty(MODELS, *shape) for i, shape in enumerate(shapes)}
    rate = torch.ones(MODELS)
    launchers.together(stacks, stacks, stacks, rate, rate, 0.9, True, None, rate)


def augment(image, dtype):
    from kernels.augment import triton as launchers

    height, width, channels = image
    images = torch.zeros(64, height, width, channels, dtype=torch.uint8).expand(
        MODELS, -1, -1, -1, -1
    )
    index = torch.zeros(MODELS, BATCH, dtype=torch.int64)
    table = torch.zeros(channels, 256, dtype=dtype).expand(MODELS, -1, -1)
    batch = activation((channels, height, width), dtype)
    launchers.augment((batch,), images, index, index, index[:, 0], table, 4, True, 8)


def grad_norm(layer, dtype):
    from kernels.grad_norm import triton as launchers

    x, grad = activation(layer, dtype), activation(layer, dtype)
    norm = torch.empty(MODELS, BATCH)
    for form in ("gram", "square"):
        launchers.conv_norms((norm,), x, grad, 3, 1, 1, True, form)
    launchers.linear_norms((norm,), x[:, :, :, 0, 0].contiguous(), norm[:, :, None], True)


PARAMETERS = [(64, 3, 3, 3), (64,), (64,), (128, 64, 3, 3), (128,), (128,), (10, 128), (10,)]
OPS = {
    "batch_norm": (batch_norm, LAYERS, FLOATS),
    "group_norm": (group_norm, LAYERS, FLOATS),
    "cross_entropy": (cross_entropy, {"10 classes": 10, "128 classes": 128}, FLOATS),
    "sgd": (sgd, {"8 parameters": PARAMETERS}, {"fp32": torch.float32}),
    "grad_norm": (grad_norm, LAYERS, FLOATS),
    "augment": (augment, {"32x32x3": (32, 32, 3)}, FLOATS),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--hold", action="store_true", help="fail on the first row out of limits")
    chosen = parser.parse_args()
    _layout.channels_last = lambda device, channels: True
    for target in chosen.targets.split(","):
        for op in chosen.ops or OPS:
            launch, layers, dtypes = OPS[op]
            for layer_name, layer in layers.items():
                for dtype_name, dtype in dtypes.items():
                    with compiling(target) as found:
                        launch(layer, dtype)
                    for compiled in found:
                        row = {"op": op, "shape": layer_name, "dtype": dtype_name}
                        row["wide"] = wide(compiled.name, layer_name, dtype_name, target)
                        row |= measure(compiled, target)
                        print(json.dumps(row), flush=True)
                        if chosen.hold and (fault := faults(row)):
                            sys.exit(fault)


if __name__ == "__main__":
    main()
