"""Before a GPU implementation serves, it is checked against its reference on that GPU, once.

Each op has a few examples: seeded stacks of odd and of full tiles. The reference runs on them in
float64, the implementation in its own type, and the greatest error must stay within a share of the
greatest value. The verdict is kept in the cache folder, by op, type, GPU, versions and source.

M models, N samples, C channels.
"""

import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import _examples

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Greatest error as a share of the greatest value."""

TF32_LIMIT = 5e-3
"""The same for float32 products of libraries that may round their factors to TF32."""

Fill = Callable[..., object]


def examine(name: str, fill: Fill, device: str, dtype: torch.dtype) -> str:
    """ "" if an implementation agrees with its op's reference on the examples, else the reason."""
    if name not in _examples.EXAMPLES:
        return "it has no example to be checked on"
    for args in _examples.EXAMPLES[name](dtype):
        reason = _compare(name, fill, [_to(a, device) for a in args], _limit(name, dtype))
        if reason:
            return reason
    return ""


def _tf32(name: str) -> bool:
    """Whether an op's library calls may use TF32 here."""
    products = name.startswith(("conv2d", "probed_", "linear")) and name != "linear_norms"
    allowed = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return products and bool(allowed)


def _limit(name: str, dtype: torch.dtype) -> float:
    return TF32_LIMIT if dtype is torch.float32 and _tf32(name) else LIMITS[dtype]


def _compare(name: str, fill: Fill, args: list[Any], limit: float) -> str:
    wanted = _by_reference(name, args)
    out = _examples.outputs(name, args)
    try:
        answer = fill(out, *args) if name != "sgd" else fill(*args)
        if args[0].is_cuda:
            torch.cuda.synchronize(args[0].device)
    except Exception as error:
        return f"it failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if answer is NotImplemented:
        return ""
    for number, (got, want) in enumerate(zip(out, wanted, strict=True)):
        if want is None:
            continue
        off = float((got.double() - want).abs().max())
        allowed = limit * max(float(want.abs().max()), 1e-30)
        if not off <= allowed:
            return f"output {number} is off by {off:.3g}, allowed {allowed:.3g}"
    return ""


def _by_reference(name: str, args: list[Any]) -> list[Tensor | None]:
    """The stacked float64 results of an op's reference, one model at a time."""
    folder = _examples.FOLDER.get(name, name.removesuffix("_backward"))
    reference = getattr(importlib.import_module(f"kernels.{folder}.reference"), name)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    if name == "sgd":
        reference(*wide)
        return [wide[0], wide[2]]
    models = next(a for a in args if isinstance(a, Tensor)).shape[0]
    rows = []
    for m in range(models):
        found = reference(*(a[m] if isinstance(a, Tensor) else a for a in wide))
        rows.append(found if isinstance(found, tuple) else (found,))
    return [None if r[0] is None else torch.stack(list(r)) for r in zip(*rows, strict=True)]


def _to(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def reason(name: str, fill: Fill, device: str, dtype: torch.dtype) -> str:
    """The cached verdict of `examine` on this machine's GPU; "" admits the implementation."""
    path = _cache() / f"{_key(name, dtype)}.json"
    try:
        return str(json.loads(path.read_text())["reason"])
    except (OSError, ValueError, KeyError):
        verdict = examine(name, fill, device, dtype)
        _write(path, {"op": name, "dtype": str(dtype), "reason": verdict})
        return verdict


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shadow-engine" / "selfcheck"


def _key(name: str, dtype: torch.dtype) -> str:
    """Everything a verdict depends on: op, type, GPU, versions, and the source of all kernels."""
    text = [name, str(dtype), torch.__version__, f"tf32={_tf32(name)}"]
    if torch.cuda.is_available():
        text += [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability())]
    if (triton := _version("triton")) is not None:
        text.append(triton)
    digest = hashlib.sha256("|".join(text).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{name}-{digest.hexdigest()[:16]}"


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(path: Path, verdict: dict[str, str]) -> None:
    """Written atomically; a cache that cannot be written only costs the next start its check."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(verdict, file)
        Path(file.name).replace(path)
    except OSError:
        return
