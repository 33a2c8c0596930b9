"""One command for the day a GPU is there: first the numbers of every op, then its speed.

    python bench/gpu_check.py               on a GPU, under eight minutes; rows to bench/results/
    python bench/gpu_check.py --dry-run     the same script on a CPU with tiny shapes; no rows

Needs torch, triton and numpy only. Nothing is timed unless everything is right. Each op is timed
against its floor (bytes over this GPU's own copy speed) and against the best library call:
cuDNN's channels-last batch norm, grouped convolution, torch's foreach SGD (gates G1, G3, G4);
a training step against plain torch: eager, as a CUDA graph, under vmap, in several processes.

M models, N samples, C channels.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import kernels  # noqa: E402
from bench.gpu_correct import correctness  # noqa: E402
from bench.gpu_rivals import Workload, one_net, plain_vmap, processes  # noqa: E402
from bench.gpu_rows import Bench, Call, Row, save, table  # noqa: E402
from kernels import _layout, grad_norm  # noqa: E402
from kernels.grad_norm.cost import fit  # noqa: E402

EAGER = "plain torch, channels-last, one net"
GRAPH = "the same, a CUDA graph"
FULL_NORM = "batch_norm with penalty and norms"
NET_SAMPLES, NET_EPOCHS = 25_000, 24
"""What makes a net in G1's nets an hour: half of CIFAR-10, ResNet-9's usual epochs."""


def activation(bench: Bench, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    like = torch.empty(0, dtype=dtype, device=bench.device)
    shape = (bench.batch, channels, size, size)
    return _layout.empty_activation(like, bench.models, shape).normal_()


def copy_speed(bench: Bench) -> float:
    """Bytes a second of a large copy: this GPU's own peak for streams."""
    source = torch.empty(2**28 if bench.device == "cuda" else 2**20, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / bench.time(lambda: target.copy_(source))


def product_speed(bench: Bench) -> float:
    """Operations a second of a large float32 product: what a training step is held against."""
    side = 8192 if bench.device == "cuda" else 256
    a, b = (torch.randn(side, side, device=bench.device) for _ in range(2))
    return 2 * side**3 / bench.time(lambda: a @ b)


def trained(loss: Callable[..., Tensor], leaves: list[Tensor]) -> Call:
    """Forward and backward of the sum of a stacked loss."""

    def call() -> object:
        return torch.autograd.grad(torch.func.vmap(loss)(*leaves).sum(), leaves)

    return call


def norms(bench: Bench, speed: float, dtype: torch.dtype) -> list[Row]:
    """G3: batch and group norm with ReLU, forward and backward, on the 8-pass count."""
    rows = []
    form = kernels.PenaltyForm(form="hinge")
    for channels, size in bench.layers:
        x = activation(bench, channels, size, dtype).requires_grad_()
        vectors = [torch.ones(bench.models, channels, device=bench.device) for _ in range(2)]
        weight, bias = (v.requires_grad_() for v in vectors)
        probe = torch.zeros(bench.models, bench.batch, device=bench.device, requires_grad=True)
        dy = torch.ones(x.shape[1:], dtype=dtype, device=bench.device)

        def plain(x: Tensor, w: Tensor, b: Tensor, dy: Tensor = dy) -> Tensor:
            y = kernels.batch_norm(x, w, b, None, None, training=True, relu=True).y
            return (y * dy).sum()

        def full(x: Tensor, w: Tensor, b: Tensor, p: Tensor, dy: Tensor = dy) -> Tensor:
            out = kernels.batch_norm(x, w, b, None, None, training=True, relu=True, penalty=form,
                                     probe_B=p)  # fmt: skip
            assert out.penalty is not None
            return (out.y * dy).sum() + out.penalty

        def groups(x: Tensor, w: Tensor, b: Tensor, dy: Tensor = dy) -> Tensor:
            return (kernels.group_norm(x, 8, w, b, relu=True) * dy).sum()

        def library(kind: str, x: Tensor = x, w: Tensor = weight, b: Tensor = bias,
                    dy: Tensor = dy) -> object:  # fmt: skip
            total = torch.zeros((), device=x.device)
            for m in range(x.shape[0]):
                if kind == "batch":
                    y = F.batch_norm(x[m], None, None, w[m], b[m], training=True)
                else:
                    y = F.group_norm(x[m], 8, w[m].to(x.dtype), b[m].to(x.dtype))
                total = total + (y.relu() * dy).sum()
            return torch.autograd.grad(total, [x, w, b])

        name, kind = f"{bench.models}x{bench.batch}x{size}x{size}x{channels}", str(dtype)[6:]
        floor = 8 * x.numel() * x.element_size() / speed
        three = [x, weight, bias]
        rival = bench.time(bench.captured(partial(library, "batch")))
        for what, call in (
            ("batch_norm", trained(plain, three)),
            (FULL_NORM, trained(full, [*three, probe])),
        ):
            seconds = bench.time(bench.captured(call))
            rows.append(Row(what, name, kind, seconds, floor, "cuDNN, a model at a time", rival))
        seconds = bench.time(bench.captured(trained(groups, three)))
        rival = bench.time(bench.captured(partial(library, "group")))
        rows.append(
            Row("group_norm", name, kind, seconds, floor, "torch, a model at a time", rival)
        )
    return rows


def pooled_norms(bench: Bench, speed: float, dtype: torch.dtype) -> list[Row]:
    """Both norms with ReLU and max-pool in the same op, on 5¾ passes."""
    rows = []
    for channels, size in bench.layers:
        x = activation(bench, channels, size, dtype).requires_grad_()
        weight = torch.ones(bench.models, channels, device=bench.device, requires_grad=True)

        def ours(norm: str, x: Tensor, w: Tensor) -> Tensor:
            if norm == "batch_norm":
                options: dict[str, Any] = {"training": True, "relu": True, "pool": 2}
                return kernels.batch_norm(x, w, None, None, None, **options).y.sum()
            return kernels.group_norm(x, 8, w, None, relu=True, pool=2).sum()

        def library(norm: str, x: Tensor = x, w: Tensor = weight) -> object:
            total = torch.zeros((), device=x.device)
            for m in range(x.shape[0]):
                if norm == "batch_norm":
                    y = F.batch_norm(x[m], None, None, w[m], torch.zeros_like(w[m]), training=True)
                else:
                    y = F.group_norm(x[m], 8, w[m].to(x.dtype))
                total = total + F.max_pool2d(y.relu(), 2).sum()
            return torch.autograd.grad(total, [x, w])

        name = f"{bench.models}x{bench.batch}x{size}x{size}x{channels}"
        floor = 5.75 * x.numel() * x.element_size() / speed
        for norm, rival in (("batch_norm", "cuDNN"), ("group_norm", "torch")):
            seconds = bench.time(bench.captured(trained(partial(ours, norm), [x, weight])))
            rival_seconds = bench.time(bench.captured(partial(library, norm)))
            rows.append(Row(f"{norm} with pooling", name, str(dtype)[6:], seconds, floor,
                            f"{rival}, a model at a time", rival_seconds))  # fmt: skip
    return rows


def sgd(bench: Bench, speed: float) -> Row:
    """One launch against torch's foreach step on the same stacked tensors."""
    shapes = [(c, c, 3, 3) for c, _ in bench.layers] + [(c,) for c, _ in bench.layers]
    stacks = [
        {str(i): torch.randn(bench.models, *s, device=bench.device) for i, s in enumerate(shapes)}
        for _ in range(3)
    ]
    rate = torch.full((bench.models,), 1e-3, device=bench.device)
    params, grads, momenta = stacks
    tensors = list(params.values())
    for tensor, grad in zip(tensors, grads.values(), strict=True):
        tensor.grad = grad
    rival = torch.optim.SGD(tensors, 1e-3, momentum=0.9, weight_decay=1e-4, foreach=True)
    rival_seconds = bench.time(rival.step)
    seconds = bench.time(
        bench.captured(lambda: kernels.sgd.step(params, grads, momenta, rate, rate))
    )
    count = sum(t.numel() for t in tensors)
    shape = f"{bench.models}x{count // bench.models}"
    return Row("sgd", shape, "float32", seconds, 20 * count / speed, "foreach", rival_seconds)


def small_ops(bench: Bench, speed: float) -> list[Row]:
    """Cross-entropy and augmentation."""
    logits = torch.randn(bench.models, bench.batch, 100, device=bench.device, requires_grad=True)
    labels = torch.zeros(bench.models, bench.batch, dtype=torch.int64, device=bench.device)

    def loss(z: Tensor) -> Tensor:
        return kernels.cross_entropy_phi(z, labels[0])[0].sum()

    def library() -> object:
        flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return torch.autograd.grad(flat, logits)

    rows = [Row("cross_entropy_phi", "x".join(map(str, logits.shape)), "float32",
                bench.time(bench.captured(trained(loss, [logits]))),
                4 * 4 * logits.numel() / speed, "torch, all models at once",
                bench.time(bench.captured(library)))]  # fmt: skip
    images = torch.zeros(1000, 32, 32, 3, dtype=torch.uint8, device=bench.device)
    key = torch.arange(bench.models, device=bench.device)
    index = labels + torch.arange(bench.batch, device=bench.device)

    def batch() -> object:
        return kernels.augment(images, index, index, key, [0.5] * 3, [0.25] * 3, pad=4, flip=True)

    written = index.numel() * 3072 * 5
    rows.append(Row("augment", f"{bench.models}x{bench.batch}x32x32x3", "float32",
                    bench.time(bench.captured(batch)), written / speed))  # fmt: skip
    return rows


def convolutions(bench: Bench, dtype: torch.dtype) -> list[Row]:
    """G4's ground: per-model calls on parallel branches, against the grouped convolution."""
    rows = []
    for channels, size in bench.layers:
        x = activation(bench, channels, size, dtype)
        weight = torch.randn(bench.models, channels, channels, 3, 3, device=bench.device).to(dtype)

        def ours(x: Tensor = x, w: Tensor = weight) -> object:
            return torch.func.vmap(lambda x, w: kernels.conv2d(x, w, None, 1, 1))(x, w)

        def grouped(x: Tensor = x, w: Tensor = weight) -> object:
            return torch.func.vmap(lambda x, w: torch.conv2d(x, w, None, 1, 1))(x, w)

        name = f"{bench.models}x{bench.batch}x{size}x{size}x{channels}"
        seconds, rival = bench.time(bench.captured(ours)), bench.time(grouped)
        rows.append(Row("conv2d 3x3", name, str(dtype)[6:], seconds, rival="grouped convolution",
                        rival_seconds=rival))  # fmt: skip
    return rows


def gradient_norms(bench: Bench, dtype: torch.dtype) -> list[Row]:
    """Both forms of the per-sample norms; their times refit the cost that chooses."""
    rows, measured = [], []
    for channels, size in bench.layers:
        x, grad = (activation(bench, channels, size, dtype) for _ in range(2))
        times = {}
        for form in ("gram", "square"):

            def call(x: Tensor = x, g: Tensor = grad, form: Any = form) -> object:
                return torch.func.vmap(lambda x, g: grad_norm.conv_norms(x, g, 3, 1, 1, form=form))(
                    x, g
                )

            times[form] = bench.time(call)
        measured.append(((size * size, channels * 9, channels), times["gram"], times["square"]))
        name = f"{bench.models}x{bench.batch}x{size}x{size}x{channels}"
        rows.append(Row("conv_norms, gram", name, str(dtype)[6:], times["gram"],
                        rival="square", rival_seconds=times["square"]))  # fmt: skip
    print(f"  refitted cost of the two forms: {fit(measured)}")
    return rows


def training(bench: Bench, sizes: tuple[int, ...], net: str) -> list[Row]:
    """G1: a training step of a stack of M, per model, beside plain torch in four forms.

    The floor is the step's operations at the speed of a large product, so its share is the MFU.
    """
    from engine.models import build
    from engine.stack import build_stack, gradients, zeros

    make = lambda: build(net, norm="batch", classes=10, channels=3, size=32)  # noqa: E731
    work = Workload(net, bench.batch, bench.device)
    alone = one_net(work)
    with FlopCounterMode(display=False) as counter:
        alone()
    peak_seconds = counter.get_total_flops() / product_speed(bench)
    what = f"training step of {net}, a model"
    alone_seconds = bench.time(alone)
    graph_seconds = bench.time(bench.captured(alone))
    rows = [
        Row(what, "one net, a CUDA graph", "float32", graph_seconds, peak_seconds, EAGER,
            alone_seconds),
    ]  # fmt: skip
    for count in bench.processes:
        seconds = processes(work, count, bench.process_seconds)
        shape = f"{count} processes"
        rows.append(Row(what, shape, "float32", seconds, peak_seconds, EAGER, alone_seconds))
    images, labels = work.images(max(sizes))
    for models in sizes:
        if not bench.left():
            print(f"  out of time before M = {models}")
            break
        skeleton, state = build_stack(make, 0, range(models))
        state = state.to(bench.device, torch.float32)
        momenta, rate = zeros(state.params), torch.full((models,), 1e-3, device=bench.device)

        def step(m: int = models, k: Any = skeleton, s: Any = state, b: Any = momenta,
                 r: Tensor = rate) -> None:  # fmt: skip
            _, grads = gradients(k, s, images[:m], labels[:m], r * 0)
            kernels.sgd.step(s.params, grads, b, r, r * 0)

        for shape, call in ((f"M={models}", step),
                            (f"M={models}, a CUDA graph", bench.captured(step))):  # fmt: skip
            seconds = bench.time(call) / models
            rows.append(Row(what, shape, "float32", seconds, peak_seconds, EAGER, alone_seconds))
            rows.append(Row(what, shape, "float32", seconds, peak_seconds, GRAPH, graph_seconds))
        if models in bench.vmapped:
            rival = bench.time(plain_vmap(work, models)) / models
            rows.append(Row(what, shape, "float32", seconds, peak_seconds, "plain vmap", rival))
    return rows


def gates(rows: list[Row], batch: int) -> list[str]:
    """G1 and G3 in sentences: what the rows say of them, and nothing of what was not run."""
    said = []
    steps = [row for row in rows if row.shape.startswith("M=") and row.rival == GRAPH]
    if steps:
        best = min(steps, key=lambda row: row.seconds)
        an_hour = 3600 / (best.seconds * (NET_SAMPLES // batch) * NET_EPOCHS)
        verdict = "held" if best.rival_seconds >= best.seconds else "not held"
        said.append(
            f"G1 {verdict}: the best stack ({best.shape}) makes {an_hour:.0f} nets a GPU-hour "
            f"({NET_EPOCHS} epochs of {NET_SAMPLES:,} samples, batch {batch}, by its steps alone), "
            f"{best.rival_seconds / best.seconds:.2f} x one net at a time as a CUDA graph"
        )
    plain = {(r.shape, r.dtype): r for r in rows if r.what == "batch_norm"}
    for row in rows:
        if row.what != FULL_NORM or (row.shape, row.dtype) not in plain:
            continue
        base = plain[row.shape, row.dtype]
        share, extra = base.floor_seconds / base.seconds, row.seconds / base.seconds - 1
        verdict = "held" if share >= 0.75 and extra <= 0.05 else "not held"
        said.append(
            f"G3 {verdict} at {row.shape} {row.dtype}: {share:.0%} of the copy speed on eight "
            f"passes (75 % asked), penalty and norms cost {extra:+.1%} (5 % allowed)"
        )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no rows")
    parser.add_argument("--seconds", type=int, default=420, help="stop starting new work after")
    chosen = parser.parse_args()
    if not chosen.dry_run and not torch.cuda.is_available():
        sys.exit("no GPU here: --dry-run tries the script on a CPU, with tiny shapes")
    deadline = time.monotonic() + chosen.seconds
    dtypes = (torch.float32,) if chosen.dry_run else (torch.float32, torch.bfloat16)
    sizes: tuple[int, ...]
    if chosen.dry_run:
        bench = Bench("cpu", 2, 4, ((16, 6),), 1, deadline, (2,), 0.5, (2,))
        sizes, net = (1, 2), "resnet8"
    else:
        layers = ((64, 32), (128, 16), (256, 8), (512, 4))
        bench = Bench("cuda", 8, 128, layers, 20, deadline, (2, 4, 8), 4.0, (1, 8))
        sizes, net = (1, 2, 4, 8, 16, 32), "resnet9"
    print("correctness")
    wrong = correctness(bench, dtypes)
    if wrong:
        sys.exit("not timed, because these are wrong:\n  " + "\n  ".join(wrong))
    print("timing")
    speed = copy_speed(bench)
    print(f"  a copy moves {speed / 1e9:.0f} GB/s")
    sections: dict[str, Callable[[], list[Row]]] = {}
    for dtype in dtypes:
        for part in (norms, pooled_norms, convolutions, gradient_norms):
            more = (dtype,) if part in (convolutions, gradient_norms) else (speed, dtype)
            sections[f"{part.__name__} in {str(dtype)[6:]}"] = partial(part, bench, *more)
    sections["sgd"] = lambda: [sgd(bench, speed)]
    sections["small ops"] = lambda: small_ops(bench, speed)
    sections["training"] = lambda: training(bench, sizes, net)
    rows: list[Row] = []
    for section, measure in sections.items():
        if bench.left():
            rows += measure()
        else:
            print(f"  out of time before {section}")
    if not chosen.dry_run:
        print(f"rows in {save(rows)}")
    print("gates" + " (tiny shapes on a CPU: they say nothing of a GPU)" * chosen.dry_run)
    print("\n".join(gates(rows, bench.batch)))
    print(table(rows))


if __name__ == "__main__":
    main()
