"""Seeded arguments for every stacked op that has a GPU implementation: what self-checks run on.

The ReLU's mask may flip where an activation is at rounding level, so gradients are 0 there.

M models, N samples, C channels, O outputs, K classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Args = list[Any]
MODELS = 2
SHAPES = ((5, 24, 9, 7), (3, 40, 1, 1), (9, 96, 16, 16))
EPS = 1e-5

FOLDER = {
    "batch_norm_pool": "batch_norm",
    "batch_norm_pool_backward": "batch_norm",
    "group_norm_pool": "group_norm",
    "group_norm_pool_backward": "group_norm",
    "cross_entropy_phi": "cross_entropy",
    "cross_entropy_phi_backward": "cross_entropy",
    "conv2d": "conv",
    "conv2d_backward": "conv",
    "conv_norms": "grad_norm",
    "linear_norms": "grad_norm",
    "probed_conv2d": "grad_norm",
    "probed_linear": "grad_norm",
}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(MODELS, *shape, generator=generator).to(dtype)


def outputs(name: str, args: Args) -> tuple[Tensor, ...]:
    """Uninitialised outputs, as the registered op allocates them."""
    if name == "sgd":
        return args[0], args[2]
    from kernels._register import _ops

    allocate = _ops[name].allocate
    assert allocate is not None
    return allocate(*args)


def _norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    channels = shape[1]
    x, residual = noise(*shape, seed=1, dtype=dtype) * 2 + 1, noise(*shape, seed=2, dtype=dtype)
    return x, noise(channels, seed=3), noise(channels, seed=4), residual


def _clear(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient, 0 where an activation may fall on either side of 0."""
    return torch.where(y.abs() < 1e-2, 0, grad)


def batch_norm(dtype: torch.dtype) -> list[Args]:
    """Training with everything on, training alone, and eval."""
    found: list[Args] = []
    for shape in SHAPES:
        x, weight, bias, residual = _norm_inputs(shape, dtype)
        mean, var = noise(shape[1], seed=5), noise(shape[1], seed=6).square() + 0.5
        rest = [EPS, True, "hinge", 0.3, True]
        found += [
            [x, weight, bias, None, None, residual, None, *rest],
            [x, None, None, None, None, None, None, EPS, False, "", 1.0, True],
            [x, weight, bias, mean, var, None, None, *rest],
        ]
    return found


def batch_norm_backward(dtype: torch.dtype) -> list[Args]:
    """The gradients of the same, with penalty and norms."""
    from kernels.batch_norm import reference

    found = []
    for args in batch_norm(dtype):
        x, weight, bias, mean, _, residual, _, eps, relu, form, tau, through = args
        wide = [a.double() if isinstance(a, Tensor) else a for a in args]
        kept = [reference.batch_norm(*(_of(a, m) for a in wide)) for m in range(MODELS)]
        y, used_mean, used_var = (torch.stack([k[i] for k in kept]) for i in range(3))
        before = [reference.batch_norm(*(_of(a, m) for a in [*wide[:8], False, *wide[9:]]))[0]
                  for m in range(MODELS)]  # fmt: skip
        grad = noise(*x.shape[1:], seed=7, dtype=dtype)
        if relu:
            grad = _clear(grad, torch.stack(before).to(grad.dtype))
        slope = noise(seed=8).abs() if form else None
        statistics = [used_mean.float(), used_var.float(), y.to(dtype) if relu else None]
        flags = [mean is None, eps, form, tau, through, True, bias is not None]
        flags += [residual is not None, True, bias, residual is not None]
        found.append([grad, slope, x, weight, *statistics, *flags])
    return found


def batch_norm_pool(dtype: torch.dtype) -> list[Args]:
    """The same with pooling, where an image holds a window."""
    return [
        [*args[:5], *args[6:]]
        for args in batch_norm(dtype)
        if min(args[0].shape[3:]) > 1 and not args[11]
    ]


def batch_norm_pool_backward(dtype: torch.dtype) -> list[Args]:
    """The gradients of the same; a window's largest stands out, whatever the rounding."""
    from kernels.batch_norm import reference

    found = []
    for args in batch_norm_pool(dtype):
        x, weight, bias, running, _, _, eps, relu, form, tau, through = args
        x = _distinct(x)
        wide = [a.double() if isinstance(a, Tensor) else a for a in (x, *args[1:])]
        kept = [reference.batch_norm_pool(*(_of(a, m) for a in wide)) for m in range(MODELS)]
        y, mean, var = (torch.stack([k[i] for k in kept]) for i in range(3))
        grad = noise(*y.shape[1:], seed=7, dtype=dtype)
        grad = _clear(grad, y.to(grad.dtype)) if relu else grad
        slope = noise(seed=8).abs() if form else None
        flags = [running is None, eps, relu, form, tau, through, True, bias is not None, True]
        found.append([grad, slope, x, weight, bias, mean.float(), var.float(), *flags])
    return found


def group_norm(dtype: torch.dtype) -> list[Args]:
    """With and without a residual."""
    found: list[Args] = []
    for shape in SHAPES:
        x, weight, bias, residual = _norm_inputs(shape, dtype)
        found += [[x, weight, bias, r, 8, EPS, True] for r in (residual, None)]
    return found


def group_norm_backward(dtype: torch.dtype) -> list[Args]:
    """The gradients of the same."""
    from kernels.group_norm import reference

    found = []
    for args in group_norm(dtype):
        x, weight, bias, residual, groups, *_ = args
        wide = [a.double() if isinstance(a, Tensor) else a for a in args]
        kept = [reference.group_norm(*(_of(a, m) for a in wide)) for m in range(MODELS)]
        y, mean, sigma = (torch.stack([k[i] for k in kept]) for i in range(3))
        before = [reference.group_norm(*(_of(a, m) for a in [*wide[:6], False]))[0]
                  for m in range(MODELS)]  # fmt: skip
        grad = noise(*x.shape[1:], seed=7, dtype=dtype)
        grad = _clear(grad, torch.stack(before).to(grad.dtype))
        added = residual is not None
        found.append([grad, x, weight, mean.float(), sigma.float(), y.to(dtype), groups, True,
                      added, bias, added])  # fmt: skip
    return found


def group_norm_pool(dtype: torch.dtype) -> list[Args]:
    """The same with pooling, where an image holds a window."""
    return [
        [*args[:3], *args[4:]]
        for args in group_norm(dtype)
        if min(args[0].shape[3:]) > 1 and args[3] is None
    ]


def group_norm_pool_backward(dtype: torch.dtype) -> list[Args]:
    """The gradients of the same; a window's largest stands out, whatever the rounding."""
    from kernels.group_norm import reference

    found = []
    for args in group_norm_pool(dtype):
        x, weight, bias, *static = args
        x = _distinct(x)
        wide = [a.double() if isinstance(a, Tensor) else a for a in (x, *args[1:])]
        kept = [reference.group_norm_pool(*(_of(a, m) for a in wide)) for m in range(MODELS)]
        y, mean, sigma = (torch.stack([k[i] for k in kept]) for i in range(3))
        grad = noise(*y.shape[1:], seed=7, dtype=dtype)
        grad = _clear(grad, y.to(grad.dtype))
        found.append([grad, x, weight, bias, mean.float(), sigma.float(), *static, True])
    return found


def _logits(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    shapes = ((7, 10), (65, 100))
    labels = [torch.arange(MODELS * n).reshape(MODELS, n) % k for n, k in shapes]
    return [
        (noise(*shape, seed=1, dtype=dtype) * 3, label)
        for shape, label in zip(shapes, labels, strict=True)
    ]


def augment(dtype: torch.dtype) -> list[Args]:
    """Crop, flip and cutout of 32×32 images."""
    from kernels.augment import normalised_bytes

    images = (noise(11, 32, 32, 3, seed=1)[:1].abs() * 90).clamp(0, 255).to(torch.uint8)
    index = torch.arange(MODELS * 6).reshape(MODELS, 6) % 11
    table = normalised_bytes([0.5] * 3, [0.25] * 3, dtype)[None].expand(MODELS, 3, 256)
    key = 5 + torch.arange(MODELS) * (2**61 - 2)
    return [
        [images.expand(MODELS, *images.shape[1:]), index, index * 99991, key, table, 4, True, 8]
    ]


CONVS = ((24, 40, 3, 2, 1), (40, 24, 1, 1, 0), (3, 16, 3, 1, 1), (32, 32, 3, 1, 1))


def _conv(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, int, int]]:
    found = []
    for channels, outs, kernel, stride, padding in CONVS:
        x, weight = (noise(5, channels, 11, 8, seed=1, dtype=dtype),
                     noise(outs, channels, kernel, kernel, seed=2, dtype=dtype))  # fmt: skip
        found.append((x, weight, noise(outs, seed=3, dtype=dtype), stride, padding))
    return found


def _conv_grad(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    kernel = weight.shape[-1]
    rows, cols = ((n + 2 * padding - kernel) // stride + 1 for n in x.shape[3:])
    return noise(x.shape[1], weight.shape[1], rows, cols, seed=4, dtype=x.dtype)


def conv_norms(dtype: torch.dtype) -> list[Args]:
    """Both forms of every layer."""
    return [
        [x, _conv_grad(x, w, s, p), w.shape[-1], s, p, True, form]
        for x, w, _, s, p in _conv(dtype)
        for form in ("gram", "square")
    ]


def conv2d_backward(dtype: torch.dtype) -> list[Args]:
    """All three gradients of every layer."""
    return [[_conv_grad(x, w, s, p), x, w, s, p, True, True] for x, w, _, s, p in _conv(dtype)]


def sgd(dtype: torch.dtype) -> list[Args]:
    """One parameter with and without Nesterov and decay."""
    stacks = [noise(33, 7, seed=s, dtype=dtype) for s in (1, 2, 3)]
    lr, decay = torch.linspace(0.1, 0.4, MODELS), torch.linspace(0.01, 0.0, MODELS)
    return [
        [*(t.clone() for t in stacks), lr, d, 0.9, n] for d, n in ((decay, False), (None, True))
    ]


def _distinct(x: Tensor) -> Tensor:
    """x with one pixel of each window far above the others, and each of four places in turn."""
    row, column = (torch.arange(n) for n in x.shape[3:])
    window = row[:, None] // 2 + column // 2
    place = row[:, None] % 2 * 2 + column % 2
    return (x + 16 * ((place + window) % 4)).to(x.dtype)


def _of(value: Any, model: int) -> Any:
    return value[model] if isinstance(value, Tensor) else value


def _grad(logits: Tensor) -> Tensor:
    return noise(logits.shape[1], seed=5)


EXAMPLES: dict[str, Callable[[torch.dtype], list[Args]]] = {
    "batch_norm": batch_norm,
    "batch_norm_backward": batch_norm_backward,
    "batch_norm_pool": batch_norm_pool,
    "batch_norm_pool_backward": batch_norm_pool_backward,
    "group_norm": group_norm,
    "group_norm_backward": group_norm_backward,
    "group_norm_pool": group_norm_pool,
    "group_norm_pool_backward": group_norm_pool_backward,
    "cross_entropy": lambda dtype: [[z, y] for z, y in _logits(dtype)],
    "cross_entropy_backward": lambda dtype: [[_grad(z), z, y] for z, y in _logits(dtype)],
    "cross_entropy_phi": lambda dtype: [[z, y] for z, y in _logits(dtype)],
    "cross_entropy_phi_backward": lambda dtype: [[_grad(z), z] for z, _ in _logits(dtype)],
    "augment": augment,
    "conv2d": lambda dtype: [[x, w, b, s, p] for x, w, b, s, p in _conv(dtype)],
    "conv2d_backward": conv2d_backward,
    "conv_norms": conv_norms,
    "linear_norms": lambda dtype: [
        [noise(5, 70, seed=1, dtype=dtype), noise(5, 9, seed=2, dtype=dtype), True]
    ],
    "probed_conv2d": lambda dtype: [
        [x, w, b, torch.zeros(MODELS, x.shape[1]), s, p] for x, w, b, s, p in _conv(dtype)
    ],
    "probed_linear": lambda dtype: [
        [noise(5, 70, seed=1, dtype=dtype), noise(9, 70, seed=2, dtype=dtype), None,
         torch.zeros(MODELS, 5)]
    ],
    "sgd": sgd,
}  # fmt: skip
