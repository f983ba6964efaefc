"""Answers held against references after a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.contamination import Reference
from benchmarks.ladder.judge import Judge
from benchmarks.ladder.load import Prepared, Raw
from benchmarks.references import key_of

REFERENCE = Reference(("a/one", "b/two"), (0.9, 0.4), 10)


def answer(status: str, *tools: tuple[str, float], code: str = "") -> Raw:
    shown = [{"id": name, "score": score} for name, score in tools]
    problem = {"code": code} if code else None
    content = {"status": status, "tools": shown, "error": problem}
    body = json.dumps({"result": {"structuredContent": content}}, separators=(",", ":")).encode()
    return Raw(Prepared("short", 7, b""), 0.0, 0.0, 1.0, status, "", body, body)


def test_an_answer_to_another_query_is_found() -> None:
    judge = Judge({7: REFERENCE})
    assert judge.compares
    assert judge.call(answer("matched", ("a/one", 0.9), ("b/two", 0.4))).differs == ""
    assert judge.call(answer("matched", ("c/three", 0.9))).differs
    assert judge.call(answer("no_match")).differs


def test_what_has_no_reference_or_no_answer_is_not_compared() -> None:
    assert Judge({8: REFERENCE}).call(answer("matched", ("c/three", 0.9))).differs is None
    assert Judge({7: REFERENCE}).call(answer("refused", code="deadline")).differs is None
    assert not Judge.of(None, ["a query"]).compares


@pytest.mark.parametrize("status", ["failed", "invalid"])
def test_a_failure_is_told_with_its_code(status: str) -> None:
    call = Judge({}).call(answer(status, code="internal"))
    assert (call.status, call.code) == ("failed", "internal")
    assert "internal" in call.reason


def test_references_are_found_by_the_text_of_their_query(tmp_path: Path) -> None:
    path = tmp_path / "references.jsonl"
    header = {"tools": ["a/one", "b/two"], "limit": 10}
    entry = ["q0", key_of("the second"), [0, 1], [0.9, 0.4], [], 0, None]
    path.write_text(json.dumps(header) + "\n" + json.dumps(entry) + "\n")
    assert Judge.of(path, ["the first", "the second"]).references == {1: REFERENCE}
    with pytest.raises(ValueError, match="no reference for any"):
        Judge.of(path, ["another"])
