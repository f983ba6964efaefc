"""Fewer candidates, from a record of more."""

from __future__ import annotations

from benchmarks.candidates import with_candidates
from benchmarks.quality_rank import Asked
from benchmarks.quality_report import final_order


def test_what_was_not_scored_follows_in_the_order_of_retrieval() -> None:
    asked = Asked(
        id="q",
        named=[9],
        lexical=[1, 2],
        dense=[3, 1],
        candidates=[1, 3, 2],
        scored=[2, 3, 1],
        logits=[-2.0, 0.0, 4.0],
        cosines=[0.1, 0.2, 0.3],
        failure="",
        ms=1.0,
    )
    fewer = with_candidates(asked, 2)
    assert (fewer.candidates, fewer.logits, fewer.cosines) == ([1, 3], [-2.0, 0.0], [0.1, 0.2])
    assert final_order(fewer) == [9, 3, 1, 2]
    assert final_order(with_candidates(asked, 3)) == [9, 2, 3, 1]
