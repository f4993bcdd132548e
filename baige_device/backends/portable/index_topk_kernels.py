# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Lightning-indexer scores of a ragged batch over a paged key cache."""

import triton
import triton.language as tl


@triton.jit
def index_scores_kernel(
    q,
    weights,
    k,
    k_scales,
    block_table,
    q_starts,
    seq_lens,
    scores,
    q_t,
    q_h,
    w_t,
    w_h,
    k_page,
    k_row,
    s_page,
    s_row,
    bt_b,
    bt_m,
    starts_stride,
    lens_stride,
    scores_t,
    first_token,
    requests,
    page_tokens,
    columns,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program: one query against STEPS tiles of BLOCK_N keys; `scores[t, s]` is -inf where s is not visible."""
    local = tl.program_id(0).to(tl.int64)
    t = local + first_token
    low = local * 0
    high = low + requests
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(q_starts + middle * starts_stride).to(tl.int64) <= t:
            low = middle
        else:
            high = middle - 1
    b = low
    is_request = b < requests
    length = tl.load(seq_lens + b * lens_stride, mask=is_request, other=0).to(tl.int64)
    after = tl.load(q_starts + (b + 1) * starts_stride, mask=is_request, other=0).to(tl.int64)
    visible = tl.where(is_request, length - (after - t) + 1, 0)
    first = tl.program_id(1) * (BLOCK_N * STEPS)
    table = block_table + tl.where(is_request, b, 0) * bt_b
    h = tl.arange(0, HEADS_BLOCK)
    d = tl.arange(0, D_BLOCK)
    inside = (h < HEADS)[:, None] & (d < D)[None, :]
    query = tl.load(q + t * q_t + (h * q_h)[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
    gate = tl.load(weights + t * w_t + h * w_h, mask=h < HEADS, other=0.0)
    for step in range(STEPS):
        n = first + step * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = n < visible
        page_index = n // page_tokens
        page = tl.load(table + page_index * bt_m, mask=seen, other=0).to(tl.int64)
        row = n - page_index * page_tokens
        where = k + (page * k_page + row * k_row)[:, None] + d[None, :]
        keys = tl.load(where, mask=seen[:, None] & (d < D)[None, :], other=0.0).to(DOT)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if SCALED:
            logits = logits * tl.load(k_scales + page * s_page + row * s_row, mask=seen, other=0.0)[None, :]
        score = tl.sum(tl.maximum(logits, 0.0) * gate[:, None], 0)
        tl.store(scores + local * scores_t + n, tl.where(seen, score, float("-inf")), mask=n < columns)
