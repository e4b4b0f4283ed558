"""Kernels of embeddings: see `kernels` for the rules.

Sample n has T tokens x_nt, each the number of one of V rows of w, D numbers long:

    out_n = s_n sum_t w[x_nt],   dw_v = sum_n c_nv s_n d_n,   c_nv = how many x_nt are v,

with s_n = 1 / T for a mean and 1 for a sum; where each token keeps a row of its own, T = 1 and
n counts the tokens of a batch.  The gradient is a product of counts and d.  A program holds a
block of rows of w and goes over all samples in order: nothing is added atomically, where the
order of arrival would show in the bits.  Together they compare V T numbers a sample and multiply
V D where a block meets a token.  For 32 samples of 64 tokens and 10,000 rows of 64 numbers that
is 20 million comparisons, and at most 1.3 billion multiplications with a row for each token, 20
million for a mean: little beside a dense layer behind them.  Sorted tokens would save comparisons
of large vocabularies, and take passes of their own.  The gradient is applied where it is computed:
blocks of w that no token names are not read, the others once, at most 2.6 MB each way; a gradient
that exists would be as much again.  Products are exact, not rounded to TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embedding_kernel(
    x,
    w,
    out,
    N: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    PADDING: tl.constexpr,
    MEAN: tl.constexpr,
    SKIP: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = relu(mean or sum of the rows of w that a sample's tokens name).

    SKIP: tokens that are PADDING do not count.  A token that names no row is NaN, so that
    its client's update is, and nothing outside of that client's rows is read.
    """
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < N * D
    n, c = at // D, at % D
    x += client * (N * T)
    w += client * (V * D)
    acc = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    for t in range(T):
        token = tl.load(x + n * T + t, mask=ok, other=0).to(tl.int64)
        known = (token >= 0) & (token < V)
        value = tl.load(w + token * D + c, mask=ok & known, other=0.0).to(tl.float32)
        value = tl.where(known, value, float("nan"))
        if SKIP:
            value = tl.where(token == PADDING, 0.0, value)
            number += (token != PADDING).to(tl.float32)
        acc += value
    if MEAN:
        acc = acc / tl.maximum(number, 1.0) if SKIP else acc / T
    if RELU:
        # Not the larger of it and zero: NaN must stay NaN.
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(out + client * (N * D) + at, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def embedding_update_kernel(
    step,
    sizes,
    rate,
    x,
    d,
    w,
    w_low,
    anchor,
    pull,
    rows,
    N: tl.constexpr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    PADDING: tl.constexpr,
    MEAN: tl.constexpr,
    SKIP: tl.constexpr,
    LOW: tl.constexpr,
    PROX: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
):
    """w <- w - rate dw, for a client that has samples; the row of PADDING has no gradient.

    PROX: all rows are drawn towards where the client began, before; without it, rows in
    blocks that no token named are not touched.
    """
    client = tl.program_id(2).to(tl.int64)
    if tl.load(sizes + tl.load(step) * rows + client) == 0:
        return
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    x += client * (N * T)
    d += client * (N * D)
    acc = tl.zeros((BV, BN), tl.float32)
    met = 0.0
    for first in range(0, N, BM):
        n = first + tl.arange(0, BM)
        counts = tl.zeros((BV, BM), tl.float32)
        number = tl.zeros((BM,), tl.float32)
        for t in range(T):
            token = tl.load(x + n * T + t, mask=n < N, other=-1)
            counts += (token[None, :] == v[:, None]).to(tl.float32)
            if SKIP:
                number += (token != PADDING).to(tl.float32)
        counts = tl.where((v != PADDING)[:, None], counts, 0.0)
        most = tl.max(counts)
        met = tl.maximum(met, most)
        if most > 0:
            inside = (n < N)[:, None] & (c < D)[None, :]
            g = tl.load(d + n[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
            if MEAN:
                g = g / tl.maximum(number, 1.0)[:, None] if SKIP else g / T
            acc = tl.dot(counts, g, acc, input_precision="ieee")
    if PROX:
        met += 1.0
    if met > 0:
        ok = (v < V)[:, None] & (c < D)[None, :]
        here = v[:, None] * D + c[None, :]
        at = client * (V * D) + here
        new = tl.load(w + at, mask=ok, other=0.0)
        if PROX:
            new += tl.load(pull) * (tl.load(anchor + here, mask=ok, other=0.0) - new)
        new -= tl.load(rate) * acc
        tl.store(w + at, new, mask=ok)
        if LOW:
            tl.store(w_low + at, new.to(w_low.dtype.element_ty), mask=ok)
