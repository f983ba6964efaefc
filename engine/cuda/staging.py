"""A step's inputs as one int32 array, so that one copy brings all of them to the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np

from engine.batch import StepRow
from engine.cuda.sizes import Bucket


@dataclass(frozen=True, slots=True)
class Sections:
    """Offsets of a step's int32 inputs in one staging array, so that one copy brings all of them."""

    tokens: int
    positions: int
    slots: int
    outputs: int
    query_starts: int
    page_starts: int
    last_page: int
    lengths: int
    page_ids: int
    end: int

    @classmethod
    def of(cls, step_tokens: int, step_rows: int, page_ids: int) -> Sections:
        # Each section starts on 16 bytes: kernels read it in vectors.
        sizes = (*(step_tokens,) * 3, *(step_rows + 2,) * 5, page_ids)
        return cls(*accumulate((-(-size // 4) * 4 for size in sizes), initial=0))


def fill(
    out: np.ndarray[tuple[int], np.dtype[np.int32]],
    at: Sections,
    rows: Sequence[StepRow],
    bucket: Bucket,
    page_tokens: int,
    scratch_page: int,
) -> int:
    """A step's inputs into `out`, padded to the bucket; returns how much of it is used.

    Padding tokens write to the scratch page and belong to no row; rows beyond the step are empty.
    """
    counts = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    ends = starts + counts
    used = -(-ends // page_tokens)
    pages = np.fromiter(
        chain.from_iterable(r.pages[:n] for r, n in zip(rows, used.tolist(), strict=True)), np.int32
    )
    first_token = np.concatenate(([0], np.cumsum(counts)))
    first_page = np.concatenate(([0], np.cumsum(used)))
    total = int(first_token[-1])
    positions = np.arange(total) + np.repeat(starts - first_token[:-1], counts)
    page_of = pages[np.repeat(first_page[:-1], counts) + positions // page_tokens]
    outputs = first_token[1:][np.fromiter((row.output for row in rows), np.bool_, len(rows))] - 1

    def put(start: int, values: np.ndarray[Any, Any], size: int, padding: int) -> None:
        out[start : start + len(values)] = values
        out[start + len(values) : start + size] = padding

    tokens = np.frombuffer(b"".join([row.tokens for row in rows]), np.int32)
    put(at.tokens, tokens, bucket.tokens, 0)
    put(at.positions, positions, bucket.tokens, 0)
    put(at.slots, page_of * page_tokens + positions % page_tokens, bucket.tokens, scratch_page * page_tokens)
    put(at.outputs, outputs, bucket.rows, 0)
    put(at.query_starts, first_token, bucket.rows + 1, total)
    put(at.page_starts, first_page, bucket.rows + 1, len(pages))
    put(at.last_page, (ends - 1) % page_tokens + 1, bucket.rows, 1)
    put(at.lengths, ends, bucket.rows, 0)
    out[at.page_ids : at.page_ids + len(pages)] = pages
    return at.page_ids + len(pages)
