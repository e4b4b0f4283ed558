"""Kernels of a stack of small networks on a GPU, each client's work apart from the others'.

Activations are [clients, batch, height, width, channels] or [clients, batch, features].
A program of a kernel works for one client, and adds up in an order that depends on that
client's shapes alone: whoever stands beside it, and how many, changes no bit of its result.
A cuBLAS or cuDNN kernel chosen by the shape of the whole program does not promise that.

A convolution reads its windows directly (an implicit matrix product), and with the
rectifier and a 2 x 2 maximum behind it only the maxima and which of four they were are
written: its full output never exists.  The gradient of a dense layer's weights is applied
where it is computed and never exists either: those weights are most of a network's bytes.

Tables of a round (which samples, how many, which random keys) lie on the device; `step`
counts the steps there, so that one recorded step can be replayed for all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    step,
    begins,
    sizes,
    shuffled,
    nowhere,
    inputs,
    targets,
    x,
    y,
    rows,
    width: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    XB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy this step's samples and targets of one client's place in the batch."""
    place, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.load(step)
    size = tl.load(sizes + t * rows + client)
    begin = tl.load(begins + t * rows + client)
    where = tl.where(size > 0, begin + tl.minimum(place, size - 1), nowhere)
    chosen = tl.load(shuffled + where).to(tl.int64)
    to = client * width + place
    tl.store(y + to, tl.load(targets + chosen))
    x += to * ((H + 2 * XB) * (W + 2 * XB) * C)
    for first in range(0, H * W * C, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(inputs + chosen * (H * W * C) + at, mask=at < H * W * C)
        r, s, c = at // (W * C), (at // C) % W, at % C
        there = ((r + XB) * (W + 2 * XB) + s + XB) * C + c
        tl.store(x + there, values, mask=at < H * W * C)


@triton.jit
def conv_kernel(
    x,
    w,
    bias,
    out,
    out_high,
    out_low,
    which,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PAD: tl.constexpr,
    OB: tl.constexpr,
    HALVES: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    POOL: tl.constexpr,
    SMALL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = pool(relu(conv(x, w) + bias)); `which` of the four in a window was the largest.

    x has a border of PAD zeros, out one of OB.  HALVES: out is written as two bfloat16, too.
    """
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    HP: tl.constexpr = HO // 2 if POOL else HO
    WP: tl.constexpr = WO // 2 if POOL else WO
    HX: tl.constexpr = H + 2 * PAD
    WX: tl.constexpr = W + 2 * PAD
    count: tl.constexpr = B * HP * WP * (4 if POOL else 1)
    b, r, s = _pixel(tl.minimum(m, count - 1), HP, WP, POOL)
    x += client * B * HX * WX * C
    w += client * KH * KW * C * O
    acc = tl.zeros((BM, BN), tl.float32)
    base = ((b * HX + r) * WX + s) * C
    if SMALL:  # few channels: the whole window is one block
        kk = tl.arange(0, BK)
        tap = ((kk // (KW * C)) * WX + (kk // C) % KW) * C + kk % C
        inside = (kk < KH * KW * C)[None, :] & (m < count)[:, None]
        a = tl.load(x + base[:, None] + tap[None, :], mask=inside, other=0.0)
        v = tl.load(
            w + kk[:, None] * O + n[None, :],
            mask=(kk < KH * KW * C)[:, None] & (n < O)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, v, acc, input_precision=PRECISION)
    else:
        blocks: tl.constexpr = (KW * C + BK - 1) // BK
        for index in range(KH * blocks):
            i = index // blocks
            jc = (index % blocks) * BK + tl.arange(0, BK)
            if (KW * C) % BK == 0:
                a = tl.load(x + (base + i * WX * C)[:, None] + jc[None, :])
            else:
                inside = (jc < KW * C)[None, :] & (m < count)[:, None]
                a = tl.load(x + (base + i * WX * C)[:, None] + jc[None, :], mask=inside, other=0.0)
            if (KW * C) % BK == 0 and O % BN == 0:
                v = tl.load(w + (i * KW * C + jc)[:, None] * O + n[None, :])
            else:
                inside = (jc < KW * C)[:, None] & (n < O)[None, :]
                v = tl.load(w + (i * KW * C + jc)[:, None] * O + n[None, :], mask=inside, other=0.0)
            acc = tl.dot(a, v, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + client * O + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    if RELU:
        # Not the larger of it and zero: NaN must stay NaN.
        acc = tl.where(acc <= 0, 0.0, acc)
    WY: tl.constexpr = WP + 2 * OB
    HY: tl.constexpr = HP + 2 * OB
    if POOL:
        four = tl.reshape(acc, (BM // 4, 4, BN))
        best, index = tl.max(four, axis=1, return_indices=True)
        p = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
        ok = (p < B * HP * WP)[:, None] & (n < O)[None, :]
        row = (p // (HP * WP)) * HY + (p % (HP * WP)) // WP + OB
        to = client * B * HY * WY * O + ((row * WY + p % WP + OB) * O)[:, None] + n[None, :]
        tl.store(out + to, best.to(out.dtype.element_ty), mask=ok)
        if HALVES:
            _store_halves(out_high, out_low, to, best, ok)
        to = client * B * HP * WP * O + p[:, None] * O + n[None, :]
        tl.store(which + to, index.to(tl.uint8), mask=ok)
    else:
        to = client * B * HY * WY * O + ((((b * HY) + r + OB) * WY + s + OB) * O)[:, None]
        ok = (m < count)[:, None] & (n < O)[None, :]
        tl.store(out + to + n[None, :], acc.to(out.dtype.element_ty), mask=ok)
        if HALVES:
            _store_halves(out_high, out_low, to + n[None, :], acc, ok)


@triton.jit
def _store_halves(high, low, to, value, ok):
    """Store a float32 as the sum of two bfloat16, which keeps 16 of its 24 bits."""
    first = value.to(tl.bfloat16)
    second = (value - first.to(tl.float32)).to(tl.bfloat16)
    tl.store(high + to, first.to(high.dtype.element_ty), mask=ok)
    tl.store(low + to, second.to(low.dtype.element_ty), mask=ok)


@triton.jit
def halves_kernel(x, high, low, length: tl.constexpr, BLOCK: tl.constexpr):
    """Write one client's numbers as sums of two bfloat16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = tl.program_id(1).to(tl.int64) * length + at
    ok = at < length
    _store_halves(high, low, to, tl.load(x + to, mask=ok, other=0.0), ok)


@triton.jit
def _pixel(m, HP: tl.constexpr, WP: tl.constexpr, POOL: tl.constexpr):
    """Sample, row and column of the m-th output; the four of a window follow one another."""
    if POOL:
        p, q = m // 4, m % 4
        b, r = p // (HP * WP), (p % (HP * WP)) // WP
        return b, 2 * r + q // 2, 2 * (p % WP) + q % 2
    return m // (HP * WP), (m % (HP * WP)) // WP, m % WP


@triton.jit
def unpool_kernel(
    d,
    which,
    dz,
    dz_high,
    dz_low,
    B: tl.constexpr,
    O: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    DB: tl.constexpr,
    HALVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """dz: each gradient at the one of four pixels that was the largest, zero elsewhere."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    b, r, s = m // (HO * WO), (m % (HO * WO)) // WO, m % WO
    HP: tl.constexpr = HO // 2
    WP: tl.constexpr = WO // 2
    ok = (m < B * HO * WO)[:, None] & (n < O)[None, :]
    there = ok & ((r < 2 * HP) & (s < 2 * WP))[:, None]
    at = client * B * HP * WP * O + (((b * HP + r // 2) * WP + s // 2) * O)[:, None] + n[None, :]
    chosen = tl.load(which + at, mask=there, other=255)
    value = tl.load(d + at, mask=there, other=0.0)
    q = ((r % 2) * 2 + s % 2).to(tl.uint8)
    HZ: tl.constexpr = HO + 2 * DB
    WZ: tl.constexpr = WO + 2 * DB
    to = client * B * HZ * WZ * O + (((b * HZ + r + DB) * WZ + s + DB) * O)[:, None] + n[None, :]
    value = tl.where(chosen == q[:, None], value, 0.0)
    tl.store(dz + to, value, mask=ok)
    if HALVES:
        _store_halves(dz_high, dz_low, to, value, ok)


@triton.jit
def conv_weights_kernel(
    x,
    dz,
    x_low,
    dz_low,
    dw,
    rows,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PAD: tl.constexpr,
    DB: tl.constexpr,
    SMALL: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Parts of dw = windows(x)' dz; dz has a border of DB.

    A program adds up one of SPLIT stretches of the pixels; the parts are added later.
    HALVES: x and dz are sums of two bfloat16 (`_store_halves`), of whose four products three
    are added: more exact than TF32, whose operands cannot be transposed on their way.
    """
    blocks: tl.constexpr = 1 if SMALL else (KW * C + BC - 1) // BC
    i = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    client, part = (tl.program_id(2) // SPLIT).to(tl.int64), tl.program_id(2) % SPLIT
    count: tl.constexpr = B * HO * WO
    HX: tl.constexpr = H + 2 * PAD
    WX: tl.constexpr = W + 2 * PAD
    HZ: tl.constexpr = HO + 2 * DB
    WZ: tl.constexpr = WO + 2 * DB
    x_base = client * B * HX * WX * C
    dz_base = client * B * HZ * WZ * O
    jc = block * BC + tl.arange(0, BC)
    length: tl.constexpr = KH * KW * C if SMALL else KW * C
    tap = (jc // (KW * C) * WX + jc // C % KW) * C + jc % C if SMALL else i * WX * C + jc
    acc = tl.zeros((BC, BN), tl.float32)
    stretch: tl.constexpr = ((count + BM - 1) // BM + SPLIT - 1) // SPLIT * BM
    for first in range(part * stretch, tl.minimum((part + 1) * stretch, count), BM):
        m = first + tl.arange(0, BM)
        here = tl.minimum(m, count - 1)
        b, r, s = here // (HO * WO), (here % (HO * WO)) // WO, here % WO
        from_dz = ((b * HZ + r + DB) * WZ + s + DB) * O
        from_x = ((b * HX + r) * WX + s) * C
        g_at = dz_base + from_dz[:, None] + n[None, :]
        a_at = x_base + from_x[:, None] + tap[None, :]
        if count % BM == 0 and O % BN == 0 and length % BC == 0:
            g, a = tl.load(dz + g_at), tl.load(x + a_at)
            if HALVES:
                g_low, a_low = tl.load(dz_low + g_at), tl.load(x_low + a_at)
        else:
            g_ok = (m < count)[:, None] & (n < O)[None, :]
            a_ok = (m < count)[:, None] & (jc < length)[None, :]
            g = tl.load(dz + g_at, mask=g_ok, other=0.0)
            a = tl.load(x + a_at, mask=a_ok, other=0.0)
            if HALVES:
                g_low = tl.load(dz_low + g_at, mask=g_ok, other=0.0)
                a_low = tl.load(x_low + a_at, mask=a_ok, other=0.0)
        acc = tl.dot(tl.trans(a), g, acc, input_precision=PRECISION)
        if HALVES:
            acc = tl.dot(tl.trans(a_low), g, acc)
            acc = tl.dot(tl.trans(a), g_low, acc)
    base = (part * rows + client) * (KH * KW * C * O)
    to = base + (i * KW * C + jc)[:, None] * O + n[None, :]
    tl.store(dw + to, acc, mask=(jc < length)[:, None] & (n < O)[None, :])


@triton.jit
def channel_sums_kernel(
    d,
    db,
    rows,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    DB: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Parts of db = sum of d over samples and pixels; d has a border of DB."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part, client = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count: tl.constexpr = B * H * W
    HD: tl.constexpr = H + 2 * DB
    WD: tl.constexpr = W + 2 * DB
    d += client * B * HD * WD * O
    sums = tl.zeros((BM, BN), tl.float32)
    stretch: tl.constexpr = ((count + BM - 1) // BM + SPLIT - 1) // SPLIT * BM
    for first in range(part * stretch, tl.minimum((part + 1) * stretch, count), BM):
        m = first + tl.arange(0, BM)
        at = (((m // (H * W)) * HD + (m % (H * W)) // W + DB) * WD + m % W + DB) * O
        ok = (m < count)[:, None] & (n < O)[None, :]
        sums += tl.load(d + at[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)
    to = db + (part * rows + client) * O + n
    tl.store(to, tl.sum(sums, axis=0), mask=n < O)


@triton.jit
def conv_inputs_kernel(
    dz,
    w,
    x,
    dx,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PAD: tl.constexpr,
    DB: tl.constexpr,
    YB: tl.constexpr,
    MASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx = the convolution's transpose of dz; MASK: x came out of a rectifier, through which
    the gradient goes on at once.  dz has a border of DB = KH - 1 - PAD, dx one of YB."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    HZ: tl.constexpr = HO + 2 * DB
    WZ: tl.constexpr = WO + 2 * DB
    dz += client * B * HZ * WZ * O
    w += client * KH * KW * C * O
    count: tl.constexpr = B * H * W
    here = tl.minimum(m, count - 1)
    b, iy, ix = here // (H * W), (here % (H * W)) // W, here % W
    base = ((b * HZ + iy) * WZ + ix) * O
    acc = tl.zeros((BM, BN), tl.float32)
    blocks: tl.constexpr = (O + BK - 1) // BK
    for index in range(KH * KW * blocks):
        tap = index // blocks
        shift = ((KH - 1 - tap // KW) * WZ + KW - 1 - tap % KW) * O
        o = (index % blocks) * BK + tl.arange(0, BK)
        if O % BK == 0 and C % BN == 0:
            g = tl.load(dz + (base + shift)[:, None] + o[None, :])
            v = tl.load(w + (tap * C + n)[:, None] * O + o[None, :])
        else:
            ok = (m < count)[:, None] & (o < O)[None, :]
            g = tl.load(dz + (base + shift)[:, None] + o[None, :], mask=ok, other=0.0)
            ok = (n < C)[:, None] & (o < O)[None, :]
            v = tl.load(w + (tap * C + n)[:, None] * O + o[None, :], mask=ok, other=0.0)
        acc = tl.dot(g, tl.trans(v), acc, input_precision=PRECISION)
    ok = (m < count)[:, None] & (n < C)[None, :]
    if MASK:
        HX: tl.constexpr = H + 2 * PAD
        WX: tl.constexpr = W + 2 * PAD
        at = client * B * HX * WX * C + (((b * HX + iy + PAD) * WX + ix + PAD) * C)[:, None]
        acc = tl.where(tl.load(x + at + n[None, :], mask=ok, other=0.0) > 0, acc, 0.0)
    HY: tl.constexpr = H + 2 * YB
    WY: tl.constexpr = W + 2 * YB
    to = client * B * HY * WY * C + (((b * HY + iy + YB) * WY + ix + YB) * C)[:, None] + n[None, :]
    tl.store(dx + to, acc.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def dense_kernel(
    x,
    w,
    parts,
    rows,
    B: tl.constexpr,
    F: tl.constexpr,
    O: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Parts of x w, each over one of SPLIT stretches of the features."""
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    blocks: tl.constexpr = (O + BN - 1) // BN
    m = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    stretch: tl.constexpr = ((F + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    for first in range(split * stretch, tl.minimum((split + 1) * stretch, F), BK):
        f = first + tl.arange(0, BK)
        a = tl.load(
            x + (client * B + m)[:, None] * F + f[None, :],
            mask=(m < B)[:, None] & (f < F)[None, :],
            other=0.0,
        )
        v = tl.load(
            w + (client * F + f)[:, None] * O + n[None, :],
            mask=(f < F)[:, None] & (n < O)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, v, acc, input_precision=PRECISION)
    to = ((split * rows + client) * B + m)[:, None] * O + n[None, :]
    tl.store(parts + to, acc, mask=(m < B)[:, None] & (n < O)[None, :])


@triton.jit
def dense_sum_kernel(
    parts,
    bias,
    out,
    rows,
    B: tl.constexpr,
    O: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = relu(sum of parts + bias)."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < B * O
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLIT):
        acc += tl.load(parts + (split * rows + client) * (B * O) + at, mask=ok, other=0.0)
    if BIAS:
        acc += tl.load(bias + client * O + at % O, mask=ok, other=0.0).to(tl.float32)
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(out + client * (B * O) + at, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def dense_inputs_kernel(
    d,
    w,
    x,
    dx,
    B: tl.constexpr,
    F: tl.constexpr,
    O: tl.constexpr,
    MASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx = d w', through the rectifier that x came out of (MASK)."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, O, BK):
        o = first + tl.arange(0, BK)
        a = tl.load(
            d + (client * B + m)[:, None] * O + o[None, :],
            mask=(m < B)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        v = tl.load(
            w + (client * F + n)[:, None] * O + o[None, :],
            mask=(n < F)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, tl.trans(v), acc, input_precision=PRECISION)
    to = (client * B + m)[:, None] * F + n[None, :]
    ok = (m < B)[:, None] & (n < F)[None, :]
    if MASK:
        acc = tl.where(tl.load(x + to, mask=ok, other=0.0) > 0, acc, 0.0)
    tl.store(dx + to, acc.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def dense_update_kernel(
    step,
    sizes,
    rate,
    x,
    d,
    w,
    bias,
    w_low,
    bias_low,
    anchor,
    bias_anchor,
    pull,
    rows,
    B: tl.constexpr,
    F: tl.constexpr,
    O: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    PROX: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """w <- w - rate x' d and bias <- bias - rate sum d, for a client that has samples.

    PROX: both are drawn towards where the client began, before.
    """
    client = tl.program_id(2).to(tl.int64)
    if tl.load(sizes + tl.load(step) * rows + client) == 0:
        return
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BF, BN), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    for first in range(0, B, BM):
        m = first + tl.arange(0, BM)
        a = tl.load(
            x + (client * B + m)[:, None] * F + f[None, :],
            mask=(m < B)[:, None] & (f < F)[None, :],
            other=0.0,
        )
        g = tl.load(
            d + (client * B + m)[:, None] * O + n[None, :],
            mask=(m < B)[:, None] & (n < O)[None, :],
            other=0.0,
        )
        acc = tl.dot(tl.trans(a), g, acc, input_precision=PRECISION)
        sums += tl.sum(g.to(tl.float32), axis=0)
    lr = tl.load(rate)
    at = (client * F + f)[:, None] * O + n[None, :]
    ok = (f < F)[:, None] & (n < O)[None, :]
    new = tl.load(w + at, mask=ok, other=0.0)
    if PROX:
        there = tl.load(anchor + f[:, None] * O + n[None, :], mask=ok, other=0.0)
        new += tl.load(pull) * (there - new)
    new -= lr * acc
    tl.store(w + at, new, mask=ok)
    if LOW:
        tl.store(w_low + at, new.to(w_low.dtype.element_ty), mask=ok)
    if BIAS and tl.program_id(0) == 0:
        here = client * O + n
        moved = tl.load(bias + here, mask=n < O, other=0.0)
        if PROX:
            moved += tl.load(pull) * (tl.load(bias_anchor + n, mask=n < O, other=0.0) - moved)
        moved -= lr * sums
        tl.store(bias + here, moved, mask=n < O)
        if LOW:
            tl.store(bias_low + here, moved.to(bias_low.dtype.element_ty), mask=n < O)


@triton.jit
def apply_kernel(
    step,
    sizes,
    rate,
    parts,
    w,
    w_low,
    anchor,
    pull,
    rows,
    length: tl.constexpr,
    SPLIT: tl.constexpr,
    LOW: tl.constexpr,
    PROX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w <- w + pull (anchor - w) - rate (sum of parts), for a client that has samples."""
    client = tl.program_id(1).to(tl.int64)
    if tl.load(sizes + tl.load(step) * rows + client) == 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < length
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):  # unrolled: loads that wait for no other
        acc += tl.load(parts + (split * rows + client) * length + at, mask=ok, other=0.0)
    new = tl.load(w + client * length + at, mask=ok, other=0.0)
    if PROX:
        new += tl.load(pull) * (tl.load(anchor + at, mask=ok, other=0.0) - new)
    new -= tl.load(rate) * acc
    tl.store(w + client * length + at, new, mask=ok)
    if LOW:
        tl.store(w_low + client * length + at, new.to(w_low.dtype.element_ty), mask=ok)


@triton.jit
def dropout_kernel(
    step,
    keys,
    x,
    relu_of,
    out,
    rows,
    threshold,
    scale,
    width: tl.constexpr,
    sample: tl.constexpr,
    drawn: tl.constexpr,
    C: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BY_PLACE: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x * mask of this step's draw; MASK: and through the rectifier of `relu_of`.

    A draw numbers its places as torch lays the tensor out, channels first: element e of a
    sample, channels last, has the place (e % C) * BY_CHANNEL + (e // C) * BY_PLACE.
    """
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < width * sample
    b, e = at // sample, at % sample
    place = b * drawn + (e % C) * BY_CHANNEL + (e // C) * BY_PLACE
    pair = keys + (tl.load(step) * rows + client) * 2
    kept = _hashed(place.to(tl.int32), tl.load(pair), tl.load(pair + 1)) >= threshold
    to = client * width * sample + at
    values = tl.load(x + to, mask=ok, other=0.0).to(tl.float32)
    if MASK:
        kept = kept & (tl.load(relu_of + to, mask=ok, other=0.0) > 0)
    tl.store(out + to, tl.where(kept, values * scale, 0.0).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _hashed(place, key, other):
    """See `draws.hashed_bits`: the same bits."""
    x = place * -1640531527 + key
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -2048144789
    x = x ^ other
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def loss_kernel(
    step,
    sizes,
    logits,
    y,
    d,
    loss_sum,
    hidden,
    rows,
    ignored,
    B: tl.constexpr,
    O: tl.constexpr,
    HIDDEN: tl.constexpr,
    AS_ZERO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cross-entropy of one client's batch: its gradient, and its sum over the samples.

    HIDDEN: outputs of hidden classes count as zero (AS_ZERO) or are left out of the sum.
    """
    client = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + tl.load(step) * rows + client)
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    label = tl.load(y + client * B + m, mask=m < B, other=0)
    counted = (m < size) & (label != ignored)
    number = tl.maximum(tl.sum(counted.to(tl.float32)), 1.0)
    ok = (m < B)[:, None] & (n < O)[None, :]
    at = (client * B + m)[:, None] * O + n[None, :]
    z = tl.load(logits + at, mask=ok, other=float("-inf")).to(tl.float32)
    z = tl.where((m < B)[:, None], z, 0.0)
    shown = n < O
    if HIDDEN:
        shown = tl.load(hidden + client * O + n, mask=n < O, other=1) == 0
        z = tl.where(shown[None, :] | (n >= O)[None, :], z, 0.0 if AS_ZERO else float("-inf"))
    top = tl.max(z, axis=1)
    e = tl.exp(z - top[:, None])
    total = tl.sum(e, axis=1)
    hit = n[None, :] == label[:, None]
    of_label = tl.sum(tl.where(hit, z, 0.0), axis=1)
    loss = tl.where(counted, top + tl.log(total) - of_label, 0.0)
    grad = (e / total[:, None] - hit.to(tl.float32)) / number
    grad = tl.where(counted[:, None] & shown[None, :], grad, 0.0)
    tl.store(d + at, grad.to(d.dtype.element_ty), mask=ok)
    tl.store(loss_sum + client, tl.load(loss_sum + client) + tl.sum(loss))


@triton.jit
def advance_kernel(step):
    """Count one step."""
    tl.store(step, tl.load(step) + 1)
