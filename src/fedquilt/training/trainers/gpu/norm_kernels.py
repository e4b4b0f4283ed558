"""Kernels of normalisation, of pools by themselves, of embeddings: see `kernels` for the rules.

Group normalisation (Wu and He 2018) of a sample x with groups of n values,

    y = gamma_c (x - mean) / sqrt(var + eps) + beta_c,

where mean and var are those of the value's group.  With h = (x - mean) / sqrt(var + eps) and
e = gamma_c dy, the gradient is

    dx = (e - mean(e) - h mean(e h)) / sqrt(var + eps),   dgamma_c = sum dy h,  dbeta_c = sum dy.

One group over a vector is layer normalisation (Ba, Kiros and Hinton 2016), one group a channel
instance normalisation (Ulyanov, Vedaldi and Lempitsky 2016).

In an embedding sample n has T tokens x_nt, each the number of one of V rows of w, D numbers long:

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
def norm_kernel(
    x,
    gamma,
    beta,
    out,
    mean,
    rstd,
    eps,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    OB: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = relu(norm(x)) of one group of one sample; out has a border of OB zeros."""
    client = tl.program_id(1).to(tl.int64)
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    CG: tl.constexpr = C // G
    n: tl.constexpr = H * W * CG
    x += (client * B + b) * (H * W * C) + g * CG
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        e = first + tl.arange(0, BLOCK)
        acc += tl.load(x + (e // CG) * C + e % CG, mask=e < n, other=0.0).to(tl.float32)
    middle = tl.sum(acc) / n
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        e = first + tl.arange(0, BLOCK)
        v = tl.load(x + (e // CG) * C + e % CG, mask=e < n, other=0.0).to(tl.float32) - middle
        acc += tl.where(e < n, v * v, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(acc) / n + eps)
    here = client * (B * G) + tl.program_id(0)
    tl.store(mean + here, middle)
    tl.store(rstd + here, scale)
    HY: tl.constexpr = H + 2 * OB
    WY: tl.constexpr = W + 2 * OB
    out += (client * B + b) * (HY * WY * C)
    for first in range(0, n, BLOCK):
        e = first + tl.arange(0, BLOCK)
        p, c = e // CG, g * CG + e % CG
        v = tl.load(x + p * C + e % CG, mask=e < n, other=0.0).to(tl.float32)
        v = (v - middle) * scale
        if AFFINE:
            v = v * tl.load(gamma + client * C + c, mask=e < n, other=0.0)
            v += tl.load(beta + client * C + c, mask=e < n, other=0.0)
        if RELU:
            # Not the larger of it and zero: NaN must stay NaN.
            v = tl.where(v <= 0, 0.0, v)
        to = ((p // W + OB) * WY + p % W + OB) * C + c
        tl.store(out + to, v.to(out.dtype.element_ty), mask=e < n)


@triton.jit
def norm_inputs_kernel(
    x,
    d,
    gamma,
    mean,
    rstd,
    dx,
    B: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    AFFINE: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of one group of one sample, through the rectifier that x came out of (MASK)."""
    client = tl.program_id(1).to(tl.int64)
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    CG: tl.constexpr = C // G
    n: tl.constexpr = P * CG
    base = (client * B + b) * (P * C) + g * CG
    here = client * (B * G) + tl.program_id(0)
    middle, scale = tl.load(mean + here), tl.load(rstd + here)
    first_sum = tl.zeros((BLOCK,), tl.float32)
    second_sum = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        k = first + tl.arange(0, BLOCK)
        at = base + (k // CG) * C + k % CG
        e = tl.load(d + at, mask=k < n, other=0.0).to(tl.float32)
        if AFFINE:
            e = e * tl.load(gamma + client * C + g * CG + k % CG, mask=k < n, other=0.0)
        h = (tl.load(x + at, mask=k < n, other=0.0).to(tl.float32) - middle) * scale
        first_sum += e
        second_sum += tl.where(k < n, e * h, 0.0)
    one, two = tl.sum(first_sum) / n, tl.sum(second_sum) / n
    for first in range(0, n, BLOCK):
        k = first + tl.arange(0, BLOCK)
        at = base + (k // CG) * C + k % CG
        e = tl.load(d + at, mask=k < n, other=0.0).to(tl.float32)
        if AFFINE:
            e = e * tl.load(gamma + client * C + g * CG + k % CG, mask=k < n, other=0.0)
        v = tl.load(x + at, mask=k < n, other=0.0).to(tl.float32)
        moved = (e - one - (v - middle) * scale * two) * scale
        if MASK:
            moved = tl.where(v > 0, moved, 0.0)
        tl.store(dx + at, moved.to(dx.dtype.element_ty), mask=k < n)


@triton.jit
def norm_weights_kernel(
    x,
    d,
    mean,
    rstd,
    gammas,
    betas,
    rows,
    B: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Parts of dgamma and dbeta, each over one of SPLIT stretches of the pixels."""
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    CG: tl.constexpr = C // G
    gamma = tl.zeros((BN,), tl.float32)
    beta = tl.zeros((BN,), tl.float32)
    stretch: tl.constexpr = ((B * P + BM - 1) // BM + SPLIT - 1) // SPLIT * BM
    for first in range(split * stretch, tl.minimum((split + 1) * stretch, B * P), BM):
        m = first + tl.arange(0, BM)
        ok = (m < B * P)[:, None] & (n < C)[None, :]
        at = client * (B * P * C) + m[:, None] * C + n[None, :]
        group = client * (B * G) + (m // P)[:, None] * G + (n // CG)[None, :]
        g = tl.load(d + at, mask=ok, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        h = (v - tl.load(mean + group, mask=ok, other=0.0)) * tl.load(
            rstd + group, mask=ok, other=0.0
        )
        gamma += tl.sum(tl.where(ok, g * h, 0.0), axis=0)
        beta += tl.sum(g, axis=0)
    to = (split * rows + client) * C + n
    tl.store(gammas + to, gamma, mask=n < C)
    tl.store(betas + to, beta, mask=n < C)


@triton.jit
def pool_kernel(
    x,
    out,
    which,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    OB: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = the largest or the mean of K x K values; `which` of them was the largest."""
    client = tl.program_id(1).to(tl.int64)
    HO: tl.constexpr = H // K
    WO: tl.constexpr = W // K
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < B * HO * WO * C
    c, s = at % C, (at // C) % WO
    r, b = (at // (C * WO)) % HO, at // (C * WO * HO)
    base = ((client * B + b) * H + r * K) * W * C + s * K * C + c
    best = tl.load(x + base, mask=ok, other=0.0).to(tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for k in range(1, K * K):
        v = tl.load(x + base + ((k // K) * W + k % K) * C, mask=ok, other=0.0).to(tl.float32)
        if MAX:
            larger = (v > best) | (v != v)  # NaN stays, as torch has it
            best = tl.where(larger, v, best)
            chosen = tl.where(larger, k, chosen)
        else:
            best += v
    if MAX:
        tl.store(which + client * (B * HO * WO * C) + at, chosen.to(tl.uint8), mask=ok)
    else:
        best = best / (K * K)
    HY: tl.constexpr = HO + 2 * OB
    WY: tl.constexpr = WO + 2 * OB
    to = ((client * B + b) * HY + r + OB) * WY * C + (s + OB) * C + c
    tl.store(out + to, best.to(out.dtype.element_ty), mask=ok)


@triton.jit
def pool_inputs_kernel(
    d,
    which,
    x,
    dx,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    MAX: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of a pool, through the rectifier that x came out of (MASK)."""
    client = tl.program_id(1).to(tl.int64)
    HO: tl.constexpr = H // K
    WO: tl.constexpr = W // K
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < B * H * W * C
    c, s = at % C, (at // C) % W
    r, b = (at // (C * W)) % H, at // (C * W * H)
    inside = ok & (r < HO * K) & (s < WO * K)
    there = (((client * B + b) * HO + r // K) * WO + s // K) * C + c
    g = tl.load(d + there, mask=inside, other=0.0).to(tl.float32)
    if MAX:
        k = tl.load(which + there, mask=inside, other=0).to(tl.int32)
        g = tl.where(k == (r % K) * K + s % K, g, 0.0)
    else:
        g = g / (K * K)
    to = client * (B * H * W * C) + at
    if MASK:
        g = tl.where(tl.load(x + to, mask=ok, other=0.0) > 0, g, 0.0)
    tl.store(dx + to, tl.where(inside, g, 0.0).to(dx.dtype.element_ty), mask=ok)


@triton.jit
def border_kernel(
    d,
    dz,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a gradient to where a border of DB zeros stands around it."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < B * H * W * C
    c, s = at % C, (at // C) % W
    r, b = (at // (C * W)) % H, at // (C * W * H)
    to = ((client * B + b) * (H + 2 * DB) + r + DB) * ((W + 2 * DB) * C) + (s + DB) * C + c
    tl.store(dz + to, tl.load(d + client * (B * H * W * C) + at, mask=ok), mask=ok)


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
