"""A step's inputs as one int32 array, so that one copy brings all of them to the card."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from engine.batch import Part, StepBlock
from engine.cuda.sizes import Bucket

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


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


@dataclass(frozen=True, slots=True)
class FlatStep:
    """What a step's parts have, laid end to end: R rows, T tokens. int32."""

    tokens: Ints  # [T]
    counts: Ints  # [R] tokens of each row
    starts: Ints  # [R] tokens before them
    pages: Ints  # [sum of page_counts]
    page_counts: Ints  # [R]
    outputs: Ints  # rows whose output is read

    @classmethod
    def of(cls, parts: Iterable[Part], page_tokens: int) -> FlatStep:
        tokens, counts, starts, pages, page_counts, outputs = (array("i") for _ in range(6))
        for part in parts:
            tokens += part.tokens
            if isinstance(part, StepBlock):
                outputs.extend(range(len(counts), len(counts) + len(part)))
                counts += part.counts
                starts += part.starts
                pages += part.pages
                page_counts += part.page_counts
            else:
                if part.output:
                    outputs.append(len(counts))
                count = len(part.tokens)
                used = -(-(part.start + count) // page_tokens)
                counts.append(count)
                starts.append(part.start)
                pages.extend(part.pages[:used])
                page_counts.append(used)
        return cls(*map(_ints, (tokens, counts, starts, pages, page_counts, outputs)))


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int32) if values else np.zeros(0, np.int32)


def fill(out: Ints, at: Sections, step: FlatStep, bucket: Bucket, page_tokens: int, scratch_page: int) -> int:
    """A step's inputs into `out`, padded to the bucket; returns how much of it is used.

    Padding tokens write to the scratch page and belong to no row; rows beyond the step are empty.
    """
    counts, starts, pages = step.counts, step.starts, step.pages
    ends = starts + counts
    first_token = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=first_token[1:])
    first_page = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(step.page_counts, out=first_page[1:])
    total = int(first_token[-1])
    positions = np.arange(total, dtype=np.int32) + np.repeat(starts - first_token[:-1], counts)
    page_of = pages[np.repeat(first_page[:-1], counts) + positions // page_tokens]
    outputs = first_token[1:][step.outputs] - 1

    def put(start: int, values: np.ndarray[Any, Any], size: int, padding: int) -> None:
        out[start : start + len(values)] = values
        out[start + len(values) : start + size] = padding

    put(at.tokens, step.tokens, bucket.tokens, 0)
    put(at.positions, positions, bucket.tokens, 0)
    put(at.slots, page_of * page_tokens + positions % page_tokens, bucket.tokens, scratch_page * page_tokens)
    put(at.outputs, outputs, bucket.rows, 0)
    put(at.query_starts, first_token, bucket.rows + 1, total)
    put(at.page_starts, first_page, bucket.rows + 1, len(pages))
    put(at.last_page, (ends - 1) % page_tokens + 1, bucket.rows, 1)
    put(at.lengths, ends, bucket.rows, 0)
    out[at.page_ids : at.page_ids + len(pages)] = pages
    return at.page_ids + len(pages)
