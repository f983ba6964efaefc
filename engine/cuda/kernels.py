"""The elementwise work of a decoder layer as three fused Triton kernels.

Unfused, this work was half of the kernel time of a step: each pass reads and writes every token's
activations again. Norms and rotations are computed in float32 and stored in the activation dtype.
"""

# mypy: disable-error-code="no-untyped-def"
# The arguments of a Triton kernel are pointers and constants, typed where it is launched.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(x, weight, out, eps, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, over the last axis. x, out [T, width], contiguous."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](x, weight, out, eps, width=width, block=block, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if out.dtype.element_ty == tl.float16:  # what is beyond its range stays a number
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up for gate_up [T, 2 * width] = gate | up; out [T, width]."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width=width, block=block, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_append(
    qkv, table, positions, slots, pages, q_norm, k_norm, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, page_tokens: tl.constexpr,
    qk_norm: tl.constexpr, fp8: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block)
    lane = tl.arange(0, half)
    every: tl.constexpr = heads + 2 * kv_heads
    inside = (head < every)[:, None] & (lane < half)[None, :]
    row = qkv + token * every * 2 * half
    low_at = head[:, None] * 2 * half + lane[None, :]
    low = tl.load(row + low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + low_at + half, mask=inside, other=0.0).to(tl.float32)

    if qk_norm:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * half)
        scale = tl.rsqrt(mean + eps)[:, None]
        is_query = (head < heads)[:, None]
        is_value = (head >= heads + kv_heads)[:, None]
        gain_low = tl.where(is_query, tl.load(q_norm + lane)[None, :], tl.load(k_norm + lane)[None, :])
        gain_high = tl.where(
            is_query, tl.load(q_norm + half + lane)[None, :], tl.load(k_norm + half + lane)[None, :]
        )
        # Rounded to the activation dtype before the rotation, as the reference does.
        low = tl.where(is_value, low, (low * scale * gain_low).to(qkv.dtype.element_ty).to(tl.float32))
        high = tl.where(is_value, high, (high * scale * gain_high).to(qkv.dtype.element_ty).to(tl.float32))

    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(table + position * 2 * half + lane)[None, :]
    sine = tl.load(table + position * 2 * half + half + lane)[None, :]
    turned = (head < heads + kv_heads)[:, None]
    new_low = tl.where(turned, low * cosine - high * sine, low)
    new_high = tl.where(turned, high * cosine + low * sine, high)

    is_q = inside & (head < heads)[:, None]
    tl.store(row + low_at, new_low.to(qkv.dtype.element_ty), mask=is_q)
    tl.store(row + low_at + half, new_high.to(qkv.dtype.element_ty), mask=is_q)

    # A page is [2, page_tokens, kv_heads, 2 * half]: keys, then values.
    slot = tl.load(slots + token).to(tl.int64)
    inner: tl.constexpr = kv_heads * 2 * half
    kv = head - heads
    is_v = kv >= kv_heads
    start = (slot // page_tokens) * 2 * page_tokens * inner + (slot % page_tokens) * inner
    offset = tl.where(is_v, page_tokens * inner + (kv - kv_heads) * 2 * half, kv * 2 * half)
    at = start + offset[:, None] + lane[None, :]
    is_kv = inside & (head >= heads)[:, None]
    if fp8:  # e4m3 has no infinity: beyond 448 the cast would give NaN
        new_low = tl.minimum(tl.maximum(new_low, -448.0), 448.0)
        new_high = tl.minimum(tl.maximum(new_high, -448.0), 448.0)
    tl.store(pages + at, new_low.to(pages.dtype.element_ty), mask=is_kv)
    tl.store(pages + at + half, new_high.to(pages.dtype.element_ty), mask=is_kv)


def rotate_append(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    eps: float,
) -> None:
    """Rotary positions on queries and keys; keys and values into pages, in one pass.

    qkv [T, (heads + 2 * kv_heads) * head_dim]: the queries are rotated in place. `table` float32
    [context, head_dim]: cosines | sines of the half dimension. positions, slots int32 [T].
    `pages` is one layer, [pages, 2, page_tokens, kv_heads, head_dim], activation dtype or e4m3.
    `norms`: Qwen3's query and key norm weights, applied to each head before the rotation.
    """
    _, _, page_tokens, kv_heads, head_dim = pages.shape
    q_norm, k_norm = norms if norms is not None else (table, table)
    _rotate_append[(qkv.shape[0],)](
        qkv, table, positions, slots, pages, q_norm, k_norm, eps,
        heads=heads, kv_heads=kv_heads, half=head_dim // 2, page_tokens=page_tokens,
        qk_norm=norms is not None, fp8=pages.dtype == torch.float8_e4m3fn,
        block=triton.next_power_of_2(heads + 2 * kv_heads), num_warps=4,
    )  # fmt: skip
