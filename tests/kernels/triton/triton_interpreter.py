"""Makes Triton's interpreter trustworthy: bfloat16 that rounds, masked lanes that hold NaN.

`prepare()` patches the interpreter of this process; it needs TRITON_INTERPRET=1 from the start,
so the tests call it in a subprocess. What it mends (seen on triton 3.6 to 3.9):

- bfloat16 is held as bit patterns and computed on as if they were integers: `dot`, arithmetic and
  the cast from float32 (which truncates) are lifted to float32 and rounded to nearest even;
- a masked load without `other` reads 0, where a GPU reads anything: here it reads NaN;
- triton 3.6 cannot loop over a run-time bound with numpy 2.4 and later;
- `torch.empty` is filled with NaN, so that an element nobody wrote is seen;
- numpy warns of infinities, which a GPU does not.
"""

import os

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_GARBAGE = 0x5A5A5A5A


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bit patterns, to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape)


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns to float32."""
    wide = np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(bits.shape)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _lift(handle: TensorHandle) -> np.ndarray:
    return widen(handle.data) if _is_bf16(handle) else handle.data


def _patch_casts() -> None:
    plain_cast, plain_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def convert(self, src, dst_type, otherwise):
        target = dst_type.scalar
        if target == tl.bfloat16 and not _is_bf16(src):
            return TensorHandle(round_to_bfloat16(src.data.astype(np.float32)), target)
        if _is_bf16(src) and target != tl.bfloat16:
            wide = widen(src.data).astype(interpreter._get_np_dtype(dst_type))
            return TensorHandle(wide, target)
        return otherwise()

    def cast_impl(self, src, dst_type):
        return convert(self, src, dst_type, lambda: plain_cast(self, src, dst_type))

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        return convert(self, src, dst_type, lambda: plain_fp(self, src, dst_type, rounding_mode))

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _patch_arithmetic() -> None:
    plain_binary, plain_unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    plain_dot, plain_sum = InterpreterBuilder.create_dot, ReduceOps.sum

    def binary_op(self, lhs, rhs, op):
        if not _is_bf16(lhs):
            return plain_binary(self, lhs, rhs, op)
        out = op(_lift(lhs), _lift(rhs))
        rounded = out if out.dtype == np.bool_ else round_to_bfloat16(out)
        return TensorHandle(rounded, lhs.dtype.scalar)

    def unary_op(self, arg, op):
        if not _is_bf16(arg):
            return plain_unary(self, arg, op)
        return TensorHandle(round_to_bfloat16(op(widen(arg.data))), arg.dtype.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        wide = [TensorHandle(_lift(h), tl.float32) if _is_bf16(h) else h for h in (a, b)]
        return plain_dot(self, *wide, d, input_precision, max_num_imprecise_acc)

    def reduce_sum(self, values):
        if values.dtype.scalar == tl.bfloat16:
            raise TypeError("a sum over bfloat16: convert to float32 straight after the load")
        return plain_sum(self, values)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.create_dot = create_dot
    ReduceOps.sum = reduce_sum


def _patch_masked_load() -> None:
    plain_load = InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *rest, **kwargs):
        if other is None and not mask.data.all():
            kind = ptrs.get_element_ty()
            np_dtype = interpreter._get_np_dtype(kind)
            if kind == tl.bfloat16:
                fill = np.uint16(0x7FC0)
            else:
                is_float = np.issubdtype(np_dtype, np.floating)
                fill = np.array(np.nan if is_float else _GARBAGE).astype(np_dtype)
            other = TensorHandle(np.full(ptrs.data.shape, fill, dtype=np_dtype), kind)
        return plain_load(self, ptrs, mask, other, *rest, **kwargs)

    InterpreterBuilder.create_masked_load = create_masked_load


def _patch_index() -> None:
    plain_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *scope):
        plain_patch(tensor, *scope)
        index = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch_lang_tensor


_prepared = False


def prepare() -> None:
    """Patch this process's interpreter, once, and fill uninitialised torch memory with NaN."""
    global _prepared
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter needs TRITON_INTERPRET=1 before triton is imported")
    if _prepared:
        return
    _prepared = True
    _patch_casts()
    _patch_arithmetic()
    _patch_masked_load()
    _patch_index()
    np.seterr(all="ignore")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
