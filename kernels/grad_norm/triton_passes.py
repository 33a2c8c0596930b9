"""Per-sample squared norms of convolution and linear gradients: the kernels.

a_t is the patch of inputs that output position t sees (k·k taps of C channels), b_t the gradient of
its O outputs; the gradient of the weight is Σ_t b_t a_tᵀ, that of the bias Σ_t b_t.

gram    a program takes two tiles of positions: Σ ⟨a_t, a_u⟩⟨b_t, b_u⟩ (+ ⟨b_t, b_u⟩ for the bias)
square  a program takes a tile of the weight at one tap: sums over positions, then squares

Programs write partial sums, which `merge` adds in a fixed order. Products of bfloat16 accumulate in
float32; float32 is multiplied as it is (no tf32).

M models, N samples, C channels, O outputs, T positions.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _patch(x_ptr, position, col, tap, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
           OUT_W: tl.constexpr, T: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
           PAD: tl.constexpr):  # fmt: skip
    """(positions, channels) of the inputs that positions see at one tap; 0 beyond the border."""
    row = position // OUT_W * STRIDE - PAD + tap // K
    column = position % OUT_W * STRIDE - PAD + tap % K
    inside = (position < T) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = (row * W + column)[:, None] * C + col[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None] & (col < C)[None, :], other=0.0)


@triton.jit
def _outputs(grad_ptr, position, out, T: tl.constexpr, OUTS: tl.constexpr):
    at = position[:, None] * OUTS + out[None, :]
    mask = (position < T)[:, None] & (out < OUTS)[None, :]
    return tl.load(grad_ptr + at, mask=mask, other=0.0)


@triton.jit
def gram(x_ptr, grad_ptr, part_ptr, samples, x_pitch, grad_pitch, H: tl.constexpr, W: tl.constexpr,
         C: tl.constexpr, OUT_W: tl.constexpr, T: tl.constexpr, OUTS: tl.constexpr,
         K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BIAS: tl.constexpr,
         TILE: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """One pair of tiles of positions of one sample; a pair off the diagonal counts twice."""
    pair, sample = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    first, second = pair // TILES, pair % TILES
    out = part_ptr + (model * samples + sample) * (TILES * TILES) + pair
    if first > second:
        tl.store(out, 0.0)
    else:
        x_ptr += model * x_pitch + tl.cast(sample, tl.int64) * (H * W * C)
        grad_ptr += model * grad_pitch + tl.cast(sample, tl.int64) * (T * OUTS)
        left = first * TILE + tl.arange(0, TILE)
        right = second * TILE + tl.arange(0, TILE)
        inputs = tl.zeros([TILE, TILE], tl.float32)
        for tap in range(K * K):
            for start in range(0, C, COLS):
                col = start + tl.arange(0, COLS)
                a = _patch(x_ptr, left, col, tap, H, W, C, OUT_W, T, K, STRIDE, PAD)
                b = _patch(x_ptr, right, col, tap, H, W, C, OUT_W, T, K, STRIDE, PAD)
                inputs = tl.dot(a, tl.trans(b), inputs, input_precision="ieee")
        if BIAS:
            inputs += 1.0
        outputs = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, OUTS, COLS):
            col = start + tl.arange(0, COLS)
            a = _outputs(grad_ptr, left, col, T, OUTS)
            b = _outputs(grad_ptr, right, col, T, OUTS)
            outputs = tl.dot(a, tl.trans(b), outputs, input_precision="ieee")
        total = tl.sum(tl.reshape(inputs * outputs, [TILE * TILE]), 0)
        tl.store(out, tl.where(first == second, total, 2.0 * total))


@triton.jit
def square(x_ptr, grad_ptr, part_ptr, samples, x_pitch, grad_pitch, H: tl.constexpr,
           W: tl.constexpr, C: tl.constexpr, OUT_W: tl.constexpr, T: tl.constexpr,
           OUTS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
           BIAS: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One tile of outputs and channels at one tap of one sample's gradient, squared."""
    block, sample = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    x_ptr += model * x_pitch + tl.cast(sample, tl.int64) * (H * W * C)
    grad_ptr += model * grad_pitch + tl.cast(sample, tl.int64) * (T * OUTS)
    tap = block % (K * K)
    rest = block // (K * K)
    blocks = (C + COLS - 1) // COLS
    col = rest % blocks * COLS + tl.arange(0, COLS)
    out = rest // blocks * COLS + tl.arange(0, COLS)
    weight = tl.zeros([COLS, COLS], tl.float32)
    bias = tl.zeros([COLS], tl.float32)
    for start in range(0, T, TILE):
        position = start + tl.arange(0, TILE)
        a = _patch(x_ptr, position, col, tap, H, W, C, OUT_W, T, K, STRIDE, PAD)
        b = _outputs(grad_ptr, position, out, T, OUTS)
        weight = tl.dot(tl.trans(b), a, weight, input_precision="ieee")
        if BIAS:
            bias += tl.sum(b.to(tl.float32), 0)
    total = tl.sum(tl.reshape(weight * weight, [COLS * COLS]), 0)
    if BIAS:
        total += tl.where(block % (K * K * blocks) == 0, tl.sum(bias * bias, 0), 0.0)
    at = (model * samples + sample) * tl.num_programs(0) + block
    tl.store(part_ptr + at, total)


@triton.jit
def merge(part_ptr, norm_ptr, samples, norm_pitch, PARTS: tl.constexpr, ROWS: tl.constexpr,
          COLS: tl.constexpr):  # fmt: skip
    """norm²_n: a sample's partial sums, added in a fixed order."""
    model = tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, PARTS, COLS):
        col = start + tl.arange(0, COLS)
        at = (model * samples + row)[:, None] * PARTS + col[None, :]
        mask = (row < samples)[:, None] & (col < PARTS)[None, :]
        total += tl.load(part_ptr + at, mask=mask, other=0.0)
    out = tl.sum(total, 1).to(norm_ptr.dtype.element_ty)
    tl.store(norm_ptr + model * norm_pitch + row, out, mask=row < samples)


@triton.jit
def linear(x_ptr, grad_ptr, norm_ptr, samples, x_pitch, grad_pitch, norm_pitch, F: tl.constexpr,
           OUTS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
           COLS: tl.constexpr):  # fmt: skip
    """(|a_n|² [+ 1]) |b_n|² of a few samples."""
    model = tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = (row < samples)[:, None]
    inputs = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, F, COLS):
        col = start + tl.arange(0, COLS)
        at = model * x_pitch + row[:, None] * F + col[None, :]
        x = tl.load(x_ptr + at, mask=here & (col < F)[None, :], other=0.0).to(tl.float32)
        inputs += x * x
    outputs = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, OUTS, COLS):
        col = start + tl.arange(0, COLS)
        at = model * grad_pitch + row[:, None] * OUTS + col[None, :]
        g = tl.load(grad_ptr + at, mask=here & (col < OUTS)[None, :], other=0.0).to(tl.float32)
        outputs += g * g
    size = tl.sum(inputs, 1)
    if BIAS:
        size += 1.0
    norm = (size * tl.sum(outputs, 1)).to(norm_ptr.dtype.element_ty)
    tl.store(norm_ptr + model * norm_pitch + row, norm, mask=row < samples)
