"""Tools' vectors: similarity against brute force, and a file that survives damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery import vectors
from mcp_discovery.discovery.vectors import VectorCache, VectorIndex, key_of

WIDTH = 4


def unit(*values: float) -> list[float]:
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def entries(*numbers: int) -> dict[bytes, np.ndarray]:
    return {key_of((number,)): np.array(unit(number, 1, 0, 2), np.float32) for number in numbers}


VECTORS = st.lists(
    st.lists(st.integers(-3, 3), min_size=WIDTH, max_size=WIDTH).filter(any), min_size=1, max_size=20
)


@given(VECTORS, st.data(), st.integers(1, 22))
def test_the_order_is_that_of_similarity_among_what_is_shown_and_has_a_vector(
    rows: list[list[int]], data: st.DataObject, most: int
) -> None:
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    shown, present = data.draw(flags), data.draw(flags)
    # Whole numbers: float32 computes their products exactly, so that equals are equal.
    index = VectorIndex(len(rows))
    for position, row in enumerate(rows):
        if present[position]:
            index.put(position, [float(value) for value in row])
    query = [1.0, 2.0, -1.0, 3.0]
    similar = [sum(a * b for a, b in zip(row, query, strict=True)) for row in rows]
    seen = [position for position in range(len(rows)) if shown[position] and present[position]]
    expected = sorted(seen, key=lambda position: (-similar[position], position))[:most]
    assert index.order(query, np.array(shown), most) == expected
    cosines = index.cosines(query, range(len(rows)))
    assert cosines == {at: pytest.approx(similar[at]) for at in range(len(rows)) if present[at]}


def test_an_index_without_vectors_orders_nothing() -> None:
    index = VectorIndex(3)
    assert index.order([1.0], np.ones(3, bool), 5) == []
    assert index.cosines([1.0], [0, 1]) == {}
    assert index.get(0) is None


def test_what_is_written_is_read_again_and_added_to(tmp_path: Path) -> None:
    cache = VectorCache.of(tmp_path / "made", "model", "adapter", "1")
    assert cache.read([key_of((1,))]) == {}
    cache.write(entries(1, 2))
    cache.write(entries(2, 3))
    found = VectorCache.of(tmp_path / "made", "model", "adapter", "1").read([*entries(1, 2, 3, 4)])
    assert list(found) == list(entries(1, 2, 3))
    for key, vector in entries(1, 2, 3).items():
        assert found[key].tolist() == vector.tolist()
    assert len(list((tmp_path / "made").iterdir())) == 1


def test_another_model_adapter_or_prompt_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = {
        VectorCache.of(tmp_path, *identity).path
        for identity in (("m", "a", "1"), ("n", "a", "1"), ("m", "b", "1"), ("m", "a", "2"))
    }
    assert len(paths) == 4


@given(st.data())
def test_a_damaged_file_counts_as_empty_and_is_written_anew(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cache = VectorCache.of(tmp_path_factory.mktemp("cache"), "x")
    cache.write(entries(1, 2, 3))
    whole = cache.path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(st.sampled_from(["cut", "flipped"]))
    flipped = bytearray(whole)
    flipped[at] ^= 1 + data.draw(st.integers(0, 254))
    cache.path.write_bytes(whole[:at] if damaged == "cut" else bytes(flipped))
    assert cache.read(entries(1, 2, 3)) == {}
    cache.write(entries(2))
    assert list(cache.read(entries(1, 2, 3))) == list(entries(2))


def test_the_oldest_vectors_go_where_the_file_would_grow_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "MAX_STORED", 3)
    cache = VectorCache.of(tmp_path, "x")
    cache.write(entries(1, 2))
    cache.write(entries(3, 4))
    assert list(cache.read(entries(1, 2, 3, 4))) == list(entries(2, 3, 4))
    cache.write(entries(5, 6, 7, 8))
    assert list(cache.read(entries(1, 2, 3, 4, 5, 6, 7, 8))) == list(entries(5, 6, 7, 8))


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    VectorCache.of(tmp_path / "file", "x").write(entries(1))
    assert "could not be kept" in caplog.text
