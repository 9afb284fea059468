"""The Mamba-2 scan by chunks, as matrix products: the kernels of ssd.py.

From a state S, with s the running sum of dt a (kept in units of log2), a block of tokens gives

    out_i = exp(s_i) c_i S + sum over j <= i of (c_i . b_j) exp(s_i - s_j) dt_j x_j
    S'    = exp(s_last) S + sum over j of exp(s_last - s_j) dt_j b_j x_j

Four launches: `ssd_prepare` makes s in each chunk, and c . b in each block of a chunk, which the heads of a group
share; `ssd_chunk_states` makes the sums of S' of whole chunks; `ssd_pass` goes through each request's chunks, after
which `ssd_scan` knows the state before each and goes through its blocks. States in between are [N, P].
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable.backends.triton import ssm


@triton.jit
def _steps(
    dt, dt_strides, a, dt_bias, low, high, steps, sums, row_stride, totals, first, count, head, live,
    CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, CHUNK)
    known = (token < count)[:, None] & live[None, :]
    at = (first + token).to(tl.int64)[:, None] * dt_strides[0] + head.to(tl.int64)[None, :] * dt_strides[1]
    step = tl.load(dt + at, known, 0.0).to(tl.float32)
    bias = tl.zeros(head.shape, tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, live, 0.0).to(tl.float32)
    step = tl.where(known, ssm.step_size(step, bias[None, :], low, high, SOFTPLUS), 0.0)
    rate = tl.load(a + head, live, 0.0) * ssm.LOG2_E
    total = tl.cumsum(step * rate[None, :], 0)
    tl.store(totals + head, tl.sum(tl.where((token == count - 1)[:, None], total, 0.0), 0), live)
    to = head.to(tl.int64)[None, :] * row_stride + (first + token)[:, None]
    tl.store(steps + to, step, known)
    tl.store(sums + to, total, known)


@triton.jit
def _products(
    b, c, b_strides, c_strides, products, first, count, group, begin,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i, n = begin + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    at = (first + i).to(tl.int64)[:, None] * c_strides[0] + group * c_strides[1] + n[None, :]
    left = tl.load(c + at, (i < count)[:, None] & (n < DIM)[None, :], 0.0)
    at = (first + i).to(tl.int64)[None, :] * b_strides[0] + group * b_strides[1] + n[:, None]
    right = tl.load(b + at, (i < count)[None, :] & (n < DIM)[:, None], 0.0)
    product = tl.dot(left, right, input_precision="ieee")
    to = products + tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(to, product.to(products.dtype.element_ty))


@triton.jit
def ssd_prepare(
    dt,
    b,
    c,
    dt_strides,
    b_strides,
    c_strides,
    a,
    dt_bias,
    low,
    high,
    steps,  # [H, T] f32
    sums,
    row_stride,
    totals,  # [M, H] f32: the last sum of each chunk
    products,  # [M, G, BLOCKS, ROWS, ROWS]
    cu_chunks,
    num_heads,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    SPAN: tl.constexpr,  # the power of two that holds a chunk
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a chunk
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Axis 0: the chunks; axis 1: the blocks of each group's products, then runs of heads."""
    chunk = tl.program_id(0)
    first = tl.load(cu_chunks + chunk)
    count = tl.load(cu_chunks + chunk + 1) - first
    kind = tl.program_id(1)
    if kind >= GROUPS * BLOCKS:
        head = (kind - GROUPS * BLOCKS) * HEADS + tl.arange(0, HEADS)
        _steps(
            dt, dt_strides, a, dt_bias, low, high, steps, sums, row_stride, totals + chunk * num_heads, first, count,
            head, head < num_heads, SPAN, SOFTPLUS,
        )  # fmt: skip
    else:
        group, begin = kind // BLOCKS, kind % BLOCKS * ROWS
        if begin < count:
            products += (chunk.to(tl.int64) * (GROUPS * BLOCKS) + kind) * (ROWS * ROWS)
            _products(b, c, b_strides, c_strides, products, first, count, group, begin, DIM, ROWS, BLOCK_N)


@triton.jit
def ssd_chunk_states(
    x,
    b,
    x_strides,
    b_strides,
    steps,
    sums,
    row_stride,
    local,  # [M, H, N, P] f32
    cu_chunks,
    num_heads,
    HEADS_PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Axis 0: heads, blocks of P and of N; axis 1: chunks."""
    columns: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    rows: tl.constexpr = (DIM + BLOCK_N - 1) // BLOCK_N
    head = tl.program_id(0) // (columns * rows)
    p = tl.program_id(0) // rows % columns * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(0) % rows * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    first = tl.load(cu_chunks + chunk)
    count = tl.load(cu_chunks + chunk + 1) - first
    steps += head.to(tl.int64) * row_stride + first
    sums += head.to(tl.int64) * row_stride + first
    x += first.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1]
    b += first.to(tl.int64) * b_strides[0] + (head // HEADS_PER_GROUP).to(tl.int64) * b_strides[1]
    last = tl.load(sums + count - 1)
    total = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)
        live = token < count
        scale = tl.load(steps + token, live, 0.0) * tl.exp2(last - tl.load(sums + token, live, 0.0))
        value = tl.load(x + token[:, None] * x_strides[0] + p[None, :], live[:, None] & (p < WIDTH)[None, :], 0.0)
        key = tl.load(b + token[None, :] * b_strides[0] + n[:, None], live[None, :] & (n < DIM)[:, None], 0.0)
        scaled = (value.to(tl.float32) * scale[:, None]).to(value.dtype)
        total = tl.dot(key, scaled, total, input_precision="ieee")
    to = local + (chunk.to(tl.int64) * num_heads + head) * (DIM * WIDTH) + n[:, None] * WIDTH + p[None, :]
    tl.store(to, total, (n < DIM)[:, None] & (p < WIDTH)[None, :])


@triton.jit
def first_chunk(last_chunks, request, ROWS: tl.constexpr):
    """The chunk behind all those of the requests in front."""
    found = -1
    for start in range(0, request, ROWS):
        row = start + tl.arange(0, ROWS)
        found = tl.maximum(found, tl.max(tl.load(last_chunks + row, row < request, -1)))
    return found + 1


@triton.jit
def ssd_pass(
    local,  # [M, H, N, P] f32
    before,  # [M, H, N, P] in the type of the products
    totals,
    pool,
    pool_strides,  # slot, head, row
    has_initial,
    initial_indices,
    chunk_state_indices,
    last_chunks,
    num_heads,
    pad_slot,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Axes: blocks of N, heads, requests."""
    head, request = tl.program_id(1), tl.program_id(2)
    n, p = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    live = (n < DIM)[:, None] & (p < WIDTH)[None, :]
    last = tl.load(last_chunks + request)
    chunk = first_chunk(last_chunks, request, 256)
    slot = tl.load(initial_indices + request)
    has = (tl.load(has_initial + request) != 0) & ssm.is_slot(slot, pad_slot) & (last >= 0)
    in_pool = head.to(tl.int64) * pool_strides[1] + p[None, :] * pool_strides[2] + n[:, None]
    state = tl.load(pool + slot.to(tl.int64) * pool_strides[0] + in_pool, live & has, 0.0).to(tl.float32)
    inside = n[:, None] * WIDTH + p[None, :]
    step = num_heads * (DIM * WIDTH)
    at = (chunk.to(tl.int64) * num_heads + head) * (DIM * WIDTH) + inside
    some = chunk <= last
    added, log = tl.load(local + at, live & some, 0.0), tl.load(totals + chunk * num_heads + head, some, 0.0)
    go = tl.load(chunk_state_indices + chunk, some, -1)
    while chunk <= last:
        # the next chunk's, so that its loads do not wait for this one's
        some = chunk < last
        next_added = tl.load(local + at + step, live & some, 0.0)
        next_log = tl.load(totals + (chunk + 1) * num_heads + head, some, 0.0)
        next_go = tl.load(chunk_state_indices + chunk + 1, some, -1)
        tl.store(before + at, state.to(before.dtype.element_ty), live)
        state = state * tl.exp2(log) + added
        if ssm.is_slot(go, pad_slot):
            tl.store(pool + go.to(tl.int64) * pool_strides[0] + in_pool, state.to(pool.dtype.element_ty), live)
        added, log, go = next_added, next_log, next_go
        at += step
        chunk += 1


@triton.jit
def ssd_scan(
    x,
    b,
    c,
    z,
    out,
    x_strides,
    b_strides,
    c_strides,
    z_strides,
    out_strides,
    d,
    steps,
    sums,
    row_stride,
    products,
    before,
    cu_chunks,
    num_heads,
    HEADS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Axis 0: heads and blocks of P; axis 1: chunks."""
    columns: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head, chunk = tl.program_id(0) // columns, tl.program_id(1)
    group = head // HEADS_PER_GROUP
    p, n, row = tl.program_id(0) % columns * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    wide, deep = (p < WIDTH)[None, :], n < DIM
    first = tl.load(cu_chunks + chunk)
    count = tl.load(cu_chunks + chunk + 1) - first
    steps += head.to(tl.int64) * row_stride + first
    sums += head.to(tl.int64) * row_stride + first
    x += first.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1]
    b += first.to(tl.int64) * b_strides[0] + group * b_strides[1]
    c += first.to(tl.int64) * c_strides[0] + group * c_strides[1]
    out += first.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    products += (chunk * GROUPS + group).to(tl.int64) * (BLOCKS * ROWS * ROWS)
    before += (chunk.to(tl.int64) * num_heads + head) * (DIM * WIDTH)
    skip = 0.0
    if d is not None:
        skip = tl.load(d + head).to(tl.float32)
    if z is not None:
        z += first.to(tl.int64) * z_strides[0] + head.to(tl.int64) * z_strides[1]
    state = tl.load(before + n[:, None] * WIDTH + p[None, :], deep[:, None] & wide, 0.0).to(tl.float32)
    base = 0.0  # the sum in front of a block
    for begin in range(0, count, ROWS):
        i = begin + row
        live = i < count
        known = live[:, None] & wide
        last = tl.load(sums + tl.minimum(begin + ROWS, count) - 1)
        total = tl.load(sums + i, live, 0.0)
        step = tl.load(steps + i, live, 0.0)
        left = tl.load(c + i[:, None] * c_strides[0] + n[None, :], live[:, None] & deep[None, :], 0.0)
        key = tl.load(b + i[None, :] * b_strides[0] + n[:, None], live[None, :] & deep[:, None], 0.0)
        value = tl.load(x + i[:, None] * x_strides[0] + p[None, :], known, 0.0)
        weight = tl.load(products + begin * ROWS + row[:, None] * ROWS + row[None, :]).to(tl.float32)
        result = tl.dot(left, state.to(left.dtype), input_precision="ieee") * tl.exp2(total - base)[:, None]
        # a row behind the last has a sum of 0 and could overflow; its weights are 0, and so is a future token's
        decay = tl.where((row[:, None] >= row[None, :]) & live[:, None], total[:, None] - total[None, :], float("-inf"))
        weight *= tl.exp2(decay) * step[None, :]
        result = tl.dot(weight.to(value.dtype), value, result, input_precision="ieee")
        scaled = value.to(tl.float32) * (step * tl.exp2(last - total))[:, None]
        state = tl.dot(key, scaled.to(value.dtype), state * tl.exp2(last - base), input_precision="ieee")
        result += skip * value.to(tl.float32)
        if z is not None:
            result *= ssm.silu(tl.load(z + i[:, None] * z_strides[0] + p[None, :], known, 0.0).to(tl.float32))
        tl.store(out + i[:, None] * out_strides[0] + p[None, :], result.to(out.dtype.element_ty), known)
        base = last
