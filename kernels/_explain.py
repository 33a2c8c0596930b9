"""Which implementation serves an op for given shapes on a device, and why, in words."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels import _register
from kernels._launch import tiles
from kernels.grad_norm.cost import COST, products


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`implementation` is reference, cpu, cuda or triton; `how` is what it does with the shapes."""

    op: str
    device: str
    dtype: str
    implementation: str
    why: str
    how: str = ""

    def __str__(self) -> str:
        text = f"{self.op} on {self.device} in {self.dtype}: {self.implementation} ({self.why})"
        return f"{text}; {self.how}" if self.how else text


def explain(
    op: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Explanation:
    """Which implementation runs `op` on `device`, and why.

    `shapes` names stacked tensors by the op's arguments: x (M, N, C, H, W), weight (M, O, C, k, k).

    Raises ValueError on an unknown op, or on shapes that do not fit it.

    >>> layer = {"x": (8, 64, 128, 16, 16), "weight": (8, 128, 128, 3, 3)}
    >>> explain("conv_norms", layer, "cuda").how
    'square form: 37,748,736 products a sample, gram would take 42,106,880'
    """
    if op not in _register._ops:
        raise ValueError(f"unknown op '{op}': known are {', '.join(sorted(_register._ops))}")
    implementation, why = _which(op, device, dtype)
    how = _how(op, implementation, shapes) if shapes else ""
    name = str(dtype).removeprefix("torch.")
    return Explanation(
        op=op, device=device, dtype=name, implementation=implementation, why=why, how=how
    )


def _which(op: str, device: str, dtype: torch.dtype) -> tuple[str, str]:
    folder = _register._ops[op].folder
    files = ("cpu",) if device == "cpu" else ("cuda", "triton")
    found = [file for file in files if _register._function(folder, file, op) is not None]
    if os.environ.get(_register.FORCE) == "reference":
        return "reference", f"{_register.FORCE}=reference forces it"
    if _register._adopted.get(_register._plan_key(op, device, dtype)) == "reference":
        return "reference", "the adopted numeric plan asks for it"
    if not found:
        return "reference", f"there is no implementation for {device}"
    served = (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
    if dtype not in served:
        return "reference", f"{found[0]} takes {' and '.join(str(d)[6:] for d in served)}"
    if device == "cpu":
        return "cpu", "the fast implementation for float32"
    if not torch.cuda.is_available():
        return found[0], "if it passes its self-check: there is no GPU here to try it on"
    fill = _register.choose(folder, op, device, dtype)
    if fill is None:
        return "reference", f"{found[0]} failed its self-check on this GPU"
    return fill.__module__.rpartition(".")[2], "it passed its self-check on this GPU"


def _how(op: str, implementation: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """What the implementation does with these shapes, where it chooses."""
    try:
        if op.startswith("batch_norm") and implementation == "triton":
            _, samples, channels, height, width = shapes["x"]
            cut = tiles(samples * height * width, channels)
            said = (
                f"{cut.blocks} blocks of {cut.cols} channels, tiles of {cut.rows} rows, "
                f"{cut.chunk} rows a program"
            )
            return f"{said}; 2x2 maxima in the same op" if "_pool" in op else said
        if op.startswith("conv2d") and implementation == "cuda":
            pointwise = tuple(shapes["weight"][3:]) == (1, 1)
            return "one matrix product a model" if pointwise else "one cuDNN call a model"
        if op.startswith("probed_"):
            return "the plain layer's own implementation: a probe changes no bit"
        if op == "conv_norms":
            form = _form(shapes)
            return form if implementation == "triton" else "square form, whatever the layer"
    except (KeyError, ValueError) as error:
        raise ValueError(f"explain got shapes {dict(shapes)} for {op}: {error}") from error
    return ""


def _form(shapes: Mapping[str, Sequence[int]]) -> str:
    """The chosen form of a layer of stride 1 that keeps its size."""
    height, width = shapes["x"][3:]
    outputs, channels, kernel, _ = shapes["weight"][1:]
    sizes = (height * width, channels * kernel * kernel, outputs)
    form = COST.choose(*sizes)
    gram, square = products(*sizes)
    chosen, other = (gram, square) if form == "gram" else (square, gram)
    rival = "square" if form == "gram" else "gram"
    return f"{form} form: {chosen:,.0f} products a sample, {rival} would take {other:,.0f}"
