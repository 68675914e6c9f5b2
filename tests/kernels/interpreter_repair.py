"""Repairs Triton's interpreter where its numbers are not a GPU's: bfloat16, eight-bit floats, loop bounds on 3.6.

The interpreter keeps bfloat16 as the bits in a uint16 and computes on those bits, truncates where hardware rounds,
and wraps eight-bit floats. Test-only, and built on private names of triton.runtime.interpreter:
test_interpreter_repair.py holds it to torch's numbers on every release. Knows none of our kernels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

Array = npt.NDArray[Any]

EIGHT_BIT_FLOATS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
NARROW_FLOATS = {tl.bfloat16, *EIGHT_BIT_FLOATS}
BIT_OPERATIONS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def bfloat16_to_float32(bits: Array) -> Array:
    """Exact: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even; every NaN becomes the quiet one."""
    wide = np.ascontiguousarray(values, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def float8_to_float32(bits: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(np.array(bits, dtype=np.uint8)).view(dtype).float().numpy()


def float32_to_float8(values: Array, dtype: torch.dtype) -> Array:
    """Bits of the nearest value, ties to even; out of range becomes the largest finite one, as on a GPU."""
    largest = np.float32(torch.finfo(dtype).max)
    finite = np.clip(np.array(values, dtype=np.float32), -largest, largest)  # keeps NaN
    return torch.from_numpy(finite).to(dtype).view(torch.uint8).numpy()


def is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widen(handle: TensorHandle) -> TensorHandle:
    """The same numbers as float32, where they are of a type that numpy lacks."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return TensorHandle(bfloat16_to_float32(handle.data), tl.float32)
    if dtype in EIGHT_BIT_FLOATS:
        return TensorHandle(float8_to_float32(handle.data, EIGHT_BIT_FLOATS[dtype]), tl.float32)
    return handle


def narrow(values: Array, dtype: tl.dtype) -> TensorHandle:
    """Numbers rounded to a type that numpy lacks."""
    if dtype == tl.bfloat16:
        return TensorHandle(float32_to_bfloat16(values), dtype)
    return TensorHandle(float32_to_float8(values, EIGHT_BIT_FLOATS[dtype]), dtype)


class RepairedBuilder(InterpreterBuilder):
    """Computes bfloat16 in float32 and rounds each result, as the compiled code does."""

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        if op in BIT_OPERATIONS or not (is_bfloat16(lhs) or is_bfloat16(rhs)):
            return super().binary_op(lhs, rhs, op)
        result = op(widen(lhs).data, widen(rhs).data)
        return TensorHandle(result, tl.bfloat16) if result.dtype == np.bool_ else narrow(result, tl.bfloat16)

    def unary_op(self, arg: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        return narrow(op(widen(arg).data), tl.bfloat16) if is_bfloat16(arg) else super().unary_op(arg, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not is_bfloat16(z):
            return super().create_fma(x, y, z)
        # Float64 holds the product and the sum of bfloat16 exactly enough to round once.
        x_wide, y_wide, z_wide = (widen(handle).data.astype(np.float64) for handle in (x, y, z))
        return narrow((x_wide * y_wide + z_wide).astype(np.float32), tl.bfloat16)

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        if not is_bfloat16(arg):
            return super().create_clampf(arg, lo, hi, propagate_nans)
        return narrow(super().create_clampf(widen(arg), widen(lo), widen(hi), propagate_nans).data, tl.bfloat16)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
        return super().create_dot(widen(a), widen(b), d, *options)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not {source, target} & NARROW_FLOATS:
            return super().cast_impl(src, dst_type)
        wide = widen(src).data
        if target in NARROW_FLOATS:
            return narrow(wide.astype(np.float32), target)
        return TensorHandle(wide.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        to_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if to_nearest and {src.dtype.scalar, dst_type.scalar} & NARROW_FLOATS:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value: float) -> TensorHandle:
        return narrow(np.array([value], dtype=np.float32), tl.bfloat16)


class RepairedReduceOps(ReduceOps):
    """Adds bfloat16 up in float32 and rounds the sum."""

    def sum(self, input: tl.tensor) -> tl.tensor:
        if not is_bfloat16(input.handle):
            return super().sum(input)
        total = np.sum(widen(input.handle).data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(float32_to_bfloat16(total), tl.bfloat16)


def install() -> None:
    """Repair the interpreter of this process; call it once, before the first launch."""
    interpreter.interpreter_builder.__class__ = RepairedBuilder
    interpreter.ReduceOps = RepairedReduceOps
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        # Numpy 2.4 no longer makes an int of an array of one element, which Triton 3.6 relies on in `range`.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
