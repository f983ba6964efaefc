"""The sizes of captured steps and their buffers. Pure: a plan needs them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.flashinfer import PACKED_TILES, query_tile, query_tiles
from engine.config import ModelShape
from engine.memory import LOGIT_ROWS

SHORT_ROW = 26  # tokens: a query of a dozen words in its frame
MOST_COLUMNS = 1 << 16
"""Of a reduction. Torch splits rows of more than 130,560 columns across blocks (Reduce.cuh: 256 values for
each of 512 threads), and takes memory for that which no line of the plan has."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a captured step: at most `tokens` new tokens in at most `rows - 1` rows, whose attention
    needs at most `tiles` query tiles. A graph launches all its tiles, needed or not, so a step of
    many short rows has a size of its own: for those the bound that holds for any rows is twice too high.
    """

    tokens: int
    rows: int
    plan_tokens: int  # what attention is planned for: it makes the tiles

    @classmethod
    def of_any_rows(cls, tokens: int, step_rows: int) -> Bucket:
        return cls(tokens, min(tokens, step_rows) + 1, tokens)

    @classmethod
    def of_short_rows(cls, tokens: int, step_rows: int, group: int) -> Bucket:
        """Rows of one tile each: at most 128 / group tokens, at least `SHORT_ROW` on average."""
        rows = min(tokens // SHORT_ROW, step_rows) + 1
        return cls(tokens, rows, rows + PACKED_TILES[-1] // group // 2)

    def tiles(self, group: int) -> int:
        return query_tiles(self.plan_tokens, self.rows, group)

    def tile(self, group: int) -> int:
        return query_tile(self.plan_tokens, self.rows, group)


def buckets(step_tokens: int, step_rows: int, group: int) -> tuple[Bucket, ...]:
    """Sizes to capture: a few small ones, then an eighth of the largest apart, so that padding costs
    little where the card is busy."""
    eighths = {step_tokens * eighth // 8 for eighth in range(1, 8)}
    sizes = {size for size in {16, 64, 256, 512, step_tokens} | eighths if 0 < size <= step_tokens}
    short = {Bucket.of_short_rows(size, step_rows, group) for size in sizes if size >= 512}
    return tuple(sorted(short | {Bucket.of_any_rows(size, step_rows) for size in sizes}))


def activation_shapes(shape: ModelShape, step_tokens: int, step_rows: int) -> dict[str, tuple[int, ...]]:
    """The step's activation buffers by name, in the activation dtype."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return {
        "residual": (step_tokens, shape.hidden),
        "normed": (step_tokens, shape.hidden),
        "qkv": (step_tokens, qkv),
        "attended": (step_tokens, shape.heads * shape.head_dim),
        "gate_up": (step_tokens, 2 * shape.intermediate),
        "activated": (step_tokens, shape.intermediate),
        "last_attended": (step_rows + 1, shape.heads * shape.head_dim),
        "last_residual": (step_rows + 1, shape.hidden),
        "hidden": (step_rows + 1, shape.hidden),
    }


def column_slices(vocabulary: int) -> list[tuple[int, int]]:
    """(start, stop) of the columns of the logits that are reduced together."""
    starts = range(0, vocabulary, MOST_COLUMNS)
    return [(start, min(start + MOST_COLUMNS, vocabulary)) for start in starts]


def head_buffers(shape: ModelShape, dtype: str) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """The buffers of full logits by name: shape, dtype, what they are. `dtype` is that of the activations."""
    rows, slices = LOGIT_ROWS, len(column_slices(shape.vocabulary))
    return {
        "logits": ((rows, shape.vocabulary), "float32", f"{rows} rows x vocabulary"),
        "head states": ((rows, shape.hidden), dtype, "what the logits are of"),
        "head rows": ((rows,), "int32", "where those are in a step"),
        "best logits": ((rows,), "float32", "of the likeliest tokens"),
        "best tokens": ((rows,), "int64", "the likeliest"),
        "slice logits": ((slices, rows), "float32", f"the same of each {MOST_COLUMNS:,} of the vocabulary"),
        "slice tokens": ((slices, rows), "int64", "the same of each slice"),
        "best slices": ((1, rows), "int64", "where the likeliest are"),
    }
