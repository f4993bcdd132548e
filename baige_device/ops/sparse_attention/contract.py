"""Contract of `sparse_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.attend_paged.contract import FLOATS, check_out
from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_dtype,
    check_finite,
    check_index_values,
    check_inner_contiguous,
    check_not_input,
    check_number,
    check_same_device,
    check_shape,
    repeats,
)

__all__ = ["CONTRACT", "FP8_DS_MLA_BYTES", "KV_FORMATS", "kv_rows", "sparse_attention"]

_OP = "sparse_attention"
KV_FORMATS = ("plain", "fp8_ds_mla")
FP8_DS_MLA_BYTES = 656
"""Row of DeepSeek-V3.2's fp8 latent cache: 512 float8_e4m3fn, 4 fp32 scales (one per 128 columns), 64 bf16 of rope."""


def sparse_attention(  # type: ignore[empty-body]
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor | None,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_indices: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    reserved_sms: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its own list of KV rows (DSA top-k, HiSparse slots, LU-KV's ragged heads).

    Args:
        q: `[T, H, D]` bf16, fp16 or fp32. H % G == 0.
        k_rows: `[S, G, D]`, or paged `[P, N, G, D]` where row id = page * N + offset; outer strides free, D dense.
            With `kv_format="fp8_ds_mla"`: uint8 `[..., 1, 656]`, and q has D = 576.
        v_rows: like `k_rows` with Dv, or None for MLA: values are the first `v_dim` columns of the keys.
        indices: int32 or int64 `[T, G, K]`: row ids per kv head. -1 is masked. Row ids within a list are distinct. No
            causality is applied: the list decides.
        scale: factor on q·k. kv_format: `plain` or `fp8_ds_mla`.
        extra_k, extra_v, extra_indices: an optional second pool with its own lists `[T, G, K2]`, attended together
            with the first in one softmax (hot buffer and resident pages). G, D, Dv and dtype are the first pool's.
        out: `[T, H, Dv]`, lse: fp32 `[T, H]` buffers; None allocates. Every element is written.
        reserved_sms: cores that a copy beside this call holds, which had better get no work: a hint that changes no
            more than the order of summation, and that a backend may ignore.
    Returns:
        out `[T, H, Dv]` of q's dtype and lse (natural log) fp32 `[T, H]`; a query with no valid row gets 0 and -inf.
    Raises:
        ContractError: shapes, dtypes, formats, half a second set, `out` in the memory of q; with checked values, a row
            id outside the pool or twice in a list.
    Offsets are int64. Values of masked rows (even NaN) never reach the output.
    Cost: reads K rows a query and kv head, 2·H·(D+Dv)·K FLOPs a query.
    """


def kv_rows(pool: Tensor) -> int:
    """Rows of a `[S, G, D]` or `[P, N, G, D]` pool."""
    return pool.shape[0] if pool.dim() == 3 else pool.shape[0] * pool.shape[1]


def _check_set(prefix: str, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, kv_format: str, v_dim: int) -> int:
    name = f"{prefix}k" if prefix else "k_rows"
    if k.dim() not in (3, 4):
        raise ContractError(_OP, f"{name}.shape", "[S, G, D] or [P, N, G, D]", str(list(k.shape)))
    check_inner_contiguous(_OP, name, k)
    if kv_format == "fp8_ds_mla":
        check_dtype(_OP, name, k, (torch.uint8,))
        check_shape(_OP, name, k, (*k.shape[:-2], 1, FP8_DS_MLA_BYTES))
        check_shape(_OP, "q", q, ("T", "H", 576))
        if v is not None or v_dim != 512:
            raise ContractError(_OP, "v_dim", "v_rows=None and v_dim=512 with fp8_ds_mla", f"v_dim={v_dim}")
        width = 512
    else:
        check_dtype(_OP, name, k, FLOATS)
        check_shape(_OP, name, k, (*k.shape[:-1], q.shape[2]))
        width = v_dim
        if v is not None:
            check_shape(_OP, f"{prefix}v" if prefix else "v_rows", v, (*k.shape[:-1], "Dv"))
            check_dtype(_OP, f"{prefix}v" if prefix else "v_rows", v, (k.dtype,))
            check_inner_contiguous(_OP, f"{prefix}v" if prefix else "v_rows", v)
            width = v.shape[-1]
        elif not 0 < v_dim <= q.shape[2]:
            raise ContractError(_OP, "v_dim", f"1 to D = {q.shape[2]} when v_rows is None", str(v_dim))
    groups = k.shape[-2]
    if groups == 0 or q.shape[1] % groups:
        raise ContractError(_OP, "q.shape[1]", f"a multiple of the {groups} kv heads", str(q.shape[1]))
    check_dtype(_OP, f"{prefix}indices", indices, INDEX_DTYPES)
    check_shape(_OP, f"{prefix}indices", indices, (q.shape[0], groups, "K"))
    return width


def check(
    values: bool,
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor | None,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_indices: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    reserved_sms: int = 0,
) -> None:
    check_dtype(_OP, "q", q, FLOATS)
    check_shape(_OP, "q", q, ("T", "H", "D"))
    if kv_format not in KV_FORMATS:
        raise ContractError(_OP, "kv_format", " or ".join(KV_FORMATS), repr(kv_format))
    width = _check_set("", q, k_rows, v_rows, indices, kv_format, v_dim)
    if (extra_k is None) != (extra_indices is None) or (extra_k is None and extra_v is not None):
        raise ContractError(_OP, "extra_k", "extra_k and extra_indices together, or neither", "one of them")
    if extra_k is not None and extra_indices is not None:
        if (extra_v is None) != (v_rows is None):
            raise ContractError(_OP, "extra_v", "given exactly when v_rows is", "the other")
        extra_width = _check_set("extra_", q, extra_k, extra_v, extra_indices, kv_format, v_dim)
        check_dtype(_OP, "extra_k", extra_k, (k_rows.dtype,))
        if extra_k.shape[-2] != k_rows.shape[-2]:
            raise ContractError(_OP, "extra_k.shape[-2]", f"G = {k_rows.shape[-2]} (as k_rows)", str(extra_k.shape[-2]))
        if extra_width != width:
            raise ContractError(_OP, "extra_v.shape[-1]", f"Dv = {width} (as v_rows)", str(extra_width))
    check_same_device(_OP, q=q, k_rows=k_rows, v_rows=v_rows, indices=indices)
    check_same_device(_OP, q=q, extra_k=extra_k, extra_v=extra_v, extra_indices=extra_indices)
    check_finite(_OP, "scale", scale)
    check_out(_OP, q, width, out, lse)
    check_not_input(_OP, "out", out, q=q)
    check_number(_OP, "reserved_sms", reserved_sms, 0)
    if values:
        _check_lists("indices", indices, k_rows)
        if extra_k is not None and extra_indices is not None:
            _check_lists("extra_indices", extra_indices, extra_k)


def _check_lists(argument: str, lists: Tensor, rows: Tensor) -> None:
    check_index_values(_OP, argument, lists, kv_rows(rows))
    ordered = lists.sort(-1).values
    twice = repeats(ordered).nonzero()
    if len(twice):
        token, group, at = twice[0].tolist()
        raise ContractError(
            _OP, f"{argument}[{token}, {group}]", "distinct rows", f"{int(ordered[token, group, at])} twice"
        )


def cost(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor | None,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_indices: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    reserved_sms: int = 0,
) -> Cost:
    """Bytes of rows read and FLOPs when every index is valid."""
    width = v_dim if v_rows is None else v_rows.shape[-1]
    entries = indices.numel() + (0 if extra_indices is None else extra_indices.numel())
    row = k_rows.shape[-1] * k_rows.element_size() + (0 if v_rows is None else width * v_rows.element_size())
    return Cost(entries * row, 2 * (q.shape[2] + width) * entries * (q.shape[1] // k_rows.shape[-2]))


CONTRACT = OpContract(
    _OP,
    "attention",
    sparse_attention,
    check,
    cost,
    "sparse_attention(Tensor q, Tensor k_rows, Tensor? v_rows, Tensor indices, *, float scale, int v_dim=0, "
    "str kv_format='plain', Tensor? extra_k=None, Tensor? extra_v=None, Tensor? extra_indices=None, "
    "int reserved_sms=0) -> (Tensor out, Tensor lse)",
)
