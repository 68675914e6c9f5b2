"""The Triton kernels of a decoder besides attention: norms, gates, the soft cap and the batch-invariant product.

Each begins with its grid. A row's result depends on no other row: nothing in a launch is chosen by the number of rows.
"""
# A kernel's constants are upper case, and its pointers have no type to annotate.
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl

from kernels.triton_math import sigmoid, tanh

TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def rms_norm_kernel(
    inputs,  # [num_tokens, hidden_size]
    residual,  # [num_tokens, hidden_size]; None = nothing to add
    weight,  # [hidden_size] float32
    out,  # [num_tokens, hidden_size]
    total_out,  # [num_tokens, hidden_size], inputs + residual; None = nothing to add
    eps,
    inputs_stride,
    residual_stride,
    HIDDEN_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """The norm of one row, which stays in registers between the sum of squares and the scaling."""
    # grid: (num_tokens,)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    is_column = column < HIDDEN_SIZE
    row = tl.load(inputs + token * inputs_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + token * residual_stride + column, mask=is_column, other=0.0).to(tl.float32)
        # The norm is that of the sum as the next layer will read it, rounded to the model's dtype.
        total = (row + added).to(total_out.dtype.element_ty)
        tl.store(total_out + token * HIDDEN_SIZE + column, total, mask=is_column)
        row = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) * (1.0 / HIDDEN_SIZE) + eps)
    weights = tl.load(weight + column, mask=is_column, other=0.0)
    tl.store(out + token * HIDDEN_SIZE + column, (row * scale * weights).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def gate_kernel(
    gate_up,  # [num_tokens, 2 * intermediate_size]
    out,  # [num_tokens, intermediate_size]
    gate_up_stride,
    SIZE: tl.constexpr,  # intermediate_size
    COLUMNS: tl.constexpr,
    GELU: tl.constexpr,  # the tanh form of GELU instead of SiLU
):
    """activation(first half) * second half, some columns of one row."""
    # grid: (num_tokens, cdiv(intermediate_size, COLUMNS))
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    gates = gate_up + token * gate_up_stride + column
    gate = tl.load(gates, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=is_column, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel for z far below 0.
        activated = gate * sigmoid((gate + 0.044715 * gate * gate * gate) * TWICE_SQRT_2_OVER_PI)
    else:
        activated = gate * sigmoid(gate)
    tl.store(out + token * SIZE + column, (activated * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def soft_cap_kernel(
    scores,  # [num_rows, SIZE] float32
    out,  # [num_rows, SIZE] float32
    cap,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cap * tanh(scores / cap), some columns of one row."""
    # grid: (num_rows, cdiv(SIZE, COLUMNS))
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    score = tl.load(scores + row * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(out + row * SIZE + column, cap * tanh(score / cap), mask=column < SIZE)


# One binary for any number of rows: a row's sum must not depend on what the compiler makes of a number it knows.
@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    inputs,  # [num_tokens, in_features]
    weight,  # [out_features, in_features]
    bias,  # [out_features]; None = no bias
    out,  # [num_tokens, out_features]
    num_tokens,
    out_features,
    in_features,
    inputs_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # in_features per step, always taken in order: the order of the sum is the result's
    SWIZZLED_ROWS: tl.constexpr,  # tiles that follow each other share this many rows of tiles, and so the L2 cache
    EVEN_DEPTH: tl.constexpr,  # DEPTH divides in_features
):
    """One tile of inputs weight^T + bias. The sum over in_features is never split among programs."""
    # grid: (cdiv(num_tokens, ROWS) * cdiv(out_features, COLUMNS),)
    num_row_tiles = tl.cdiv(num_tokens, ROWS)
    num_column_tiles = tl.cdiv(out_features, COLUMNS)
    tiles_per_band = SWIZZLED_ROWS * num_column_tiles
    band = tl.program_id(0) // tiles_per_band
    rows_in_band = tl.minimum(num_row_tiles - band * SWIZZLED_ROWS, SWIZZLED_ROWS)
    in_band = tl.program_id(0) % tiles_per_band
    row = (band * SWIZZLED_ROWS + in_band % rows_in_band) * ROWS + tl.arange(0, ROWS)
    column = (in_band // rows_in_band) * COLUMNS + tl.arange(0, COLUMNS)
    # 64 bits: a head of 256k tokens times 8k features has 2^31 weights. Past the ends the last row is read again.
    input_row = tl.minimum(row, num_tokens - 1).to(tl.int64) * inputs_stride
    weight_row = tl.minimum(column, out_features - 1).to(tl.int64) * weight_stride
    depth = tl.arange(0, DEPTH)
    input_tile = inputs + input_row[:, None] + depth[None, :]
    weight_tile = weight + weight_row[None, :] + depth[:, None]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, in_features, DEPTH):
        if EVEN_DEPTH:
            a = tl.load(input_tile)
            b = tl.load(weight_tile)
        else:
            a = tl.load(input_tile, mask=(depth < in_features - begin)[None, :], other=0.0)
            b = tl.load(weight_tile, mask=(depth < in_features - begin)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        input_tile += DEPTH
        weight_tile += DEPTH
    if bias is not None:
        acc += tl.load(bias + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    pointers = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    is_out = (row < num_tokens)[:, None] & (column < out_features)[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=is_out)
