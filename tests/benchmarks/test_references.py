"""Which candidates are certain, what a ranking says about right answers, and the file they are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.contamination import Answer, Reference, Tolerance, compare
from benchmarks.references import (
    Query,
    References,
    _line,
    _opened,
    candidates_within,
    difference,
    key_of,
    reference_of,
)
from engine.request import Scored
from mcp_discovery.discovery.calibration import Calibration, evidence, logit
from mcp_discovery.discovery.call import Ranking
from mcp_discovery.discovery.candidates import fuse

NOISE = 0.05
IDS = [f"s/t{number}" for number in range(24)]


@st.composite
def retrievals(draw: st.DrawFn) -> tuple[list[int], dict[int, float], dict[int, float]]:
    """BM25's order, the cosines, and the same with noise."""
    count = draw(st.integers(1, len(IDS)))
    cosines = {p: draw(st.floats(-1.0, 1.0)) for p in range(count)}
    noisy = {p: value + draw(st.floats(-NOISE / 2, NOISE / 2)) for p, value in cosines.items()}
    lexical = draw(st.lists(st.sampled_from(range(count)), unique=True))
    return lexical, cosines, noisy


def by_cosine(cosines: dict[int, float]) -> list[int]:
    return sorted(cosines, key=lambda position: (-cosines[position], position))


@settings(max_examples=50)
@given(retrievals(), st.integers(1, 12))
def test_noise_moves_candidates_only_between_certain_and_possible(
    retrieval: tuple[list[int], dict[int, float], dict[int, float]], wanted: int
) -> None:
    lexical, cosines, noisy = retrieval
    certain, possible = candidates_within(lexical, cosines, wanted, NOISE + 1e-9)
    chosen = set(fuse([lexical, by_cosine(noisy)])[:wanted])
    assert certain <= chosen <= possible
    assert len(certain) <= wanted


def ranking_of(
    lexical: list[int], cosines: dict[int, float], values: dict[int, float], scored: int, named: int
) -> Ranking:
    """As discovery gives it, `scored` candidates after the first `named` tools, which the query names."""
    names = tuple(range(100, 100 + named))
    dense = by_cosine(cosines)
    candidates = fuse([lexical, dense])[:scored]
    weights = evidence({p: values[p] for p in candidates}, cosines)
    calibration = Calibration()
    return Ranking(
        named=names,
        lexical=(*names, *lexical),
        dense=tuple(dense),
        candidates=tuple(candidates),
        scored=tuple(sorted(weights, key=lambda position: -weights[position])),
        probabilities={p: 1 / (1 + pow(2.718281828459045, -values[p])) for p in candidates},
        cosines={p: cosines[p] for p in candidates},
        scores={p: calibration.probability(weight) for p, weight in weights.items()},
        doubtful=False,
        outcome=Scored(()),
        query_truncated=False,
        retrieve_ms=0.0,
    )


@settings(max_examples=50)
@given(retrievals(), st.data(), st.integers(1, 8), st.integers(0, 2))
def test_an_answer_with_noisy_vectors_is_clean(
    retrieval: tuple[list[int], dict[int, float], dict[int, float]],
    data: st.DataObject,
    wanted: int,
    named: int,
) -> None:
    lexical, cosines, noisy = retrieval
    values = {position: data.draw(st.floats(-5.0, 5.0)) for position in cosines}
    tools = [*IDS, *[""] * 76, "s/named0", "s/named1"]
    ranking = ranking_of(lexical, cosines, values, len(cosines), named)
    reference = reference_of(
        ranking, tools, cosines, Calibration(), wanted=wanted, limit=4, noise=NOISE + 1e-9
    )
    assert reference is not None
    seen = ranking_of(lexical, noisy, values, wanted, named)
    found = [(tools[position], 1.0) for position in seen.named]
    found += [(tools[position], seen.scores[position]) for position in seen.scored]
    answer = Answer(tuple(tool for tool, _ in found[:4]), tuple(score for _, score in found[:4]), 4)
    assert compare(reference, answer, Tolerance(log_odds=10.0 * NOISE + 1e-6)).sentence == ""


def test_a_candidate_without_a_score_leaves_no_reference() -> None:
    cosines = {0: 0.9, 1: 0.5, 2: 0.499}
    values = dict.fromkeys(cosines, 0.0)
    ranking = ranking_of([], cosines, values, 2, 0)
    assert reference_of(ranking, IDS, cosines, Calibration(), wanted=2, limit=4, noise=0.05) is None
    assert reference_of(ranking, IDS, cosines, Calibration(), wanted=2, limit=4, noise=0.0001) is not None


def test_assurance_is_that_of_the_best_candidate() -> None:
    cosines = {0: 0.9, 1: 0.5}
    ranking = ranking_of([], cosines, {0: -2.0, 1: 1.0}, 2, 0)
    calibration = Calibration(doubt_weight=10.0, doubt_below=4.0)
    reference = reference_of(ranking, IDS, cosines, calibration, limit=4)
    assert reference is not None
    assert reference.assurance == pytest.approx(3.0)
    assert logit(ranking.probabilities[0]) == pytest.approx(-2.0)


HEADER = {"model_sha256": "m", "limit": 2, "tools": ["s/a", "s/b", "s/c"]}
QUERY = Query("q1", "find a")
REFERENCE = Reference(("s/b", "s/c", "s/a"), (1.0, 0.5, 0.25), 2, frozenset({"s/c"}), -1.5, 1)


def test_a_file_gives_back_what_was_written_and_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "references.jsonl"
    file, known = _opened(path, HEADER)
    with file:
        assert known == set()
        file.write(_line(QUERY, REFERENCE, {"s/a": 0, "s/b": 1, "s/c": 2}))
        file.write('["q2","cut o')
    file, known = _opened(path, HEADER)
    file.close()
    assert known == {QUERY.key}
    references = References.read(path)
    assert references.of("find a") == REFERENCE
    assert references.of("find b") is None
    assert references.by_key == {key_of("find a"): REFERENCE}


def test_a_file_of_another_run_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "references.jsonl"
    _opened(path, HEADER)[0].close()
    with pytest.raises(SystemExit, match="computed with another model"):
        _opened(path, {**HEADER, "model_sha256": "other"})


@pytest.mark.parametrize("content", ["", "[]\n", json.dumps({"id": "q1"}) + "\n"])
def test_another_file_is_not_read_as_references(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="no file of reference answers"):
        References.read(path)


def references_of(**scores: dict[str, float]) -> References:
    found = {
        key: Reference(
            tuple(tools), tuple(tools.values()), limit=2, uncertain=frozenset({"s/u"} & set(tools))
        )
        for key, tools in scores.items()
    }
    return References({}, found)


def test_files_of_references_differ_by_scores_and_by_order() -> None:
    one = references_of(a={"s/x": 0.9, "s/y": 0.5}, b={"s/x": 0.6, "s/y": 0.4}, alone={"s/x": 0.1})
    other = references_of(a={"s/x": 0.9, "s/y": 0.5}, b={"s/y": 0.6, "s/x": 0.4}, elsewhere={"s/x": 0.7})
    found = difference(one, other)
    assert (found.queries, found.other_orders) == (2, 1)
    assert found.largest_log_odds == pytest.approx(logit(0.6) - logit(0.4))


def test_an_uncertain_tool_is_no_difference_of_order() -> None:
    one = references_of(a={"s/u": 0.9, "s/x": 0.8, "s/y": 0.5})
    other = references_of(a={"s/x": 0.8, "s/u": 0.79, "s/y": 0.5})
    assert difference(one, other).other_orders == 0
    assert difference(one, references_of(a={"s/x": 0.8, "s/z": 0.5})) == difference(one, one)
