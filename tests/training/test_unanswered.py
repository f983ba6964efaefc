"""Requests that nothing serves: what a group may call certainly wrong, and what is kept out of training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.training.corpus import Corpus, Example, Source
from mcp_discovery.training.data import Query, ToolSet, load_set, split_set
from mcp_discovery.training.groups import GroupSampler, Mixture
from mcp_discovery.training.mining import FOREIGN_LIKENESS, FOREIGN_MARGIN, _strangers, mine
from mcp_discovery.training.snapshots import held_out, with_averages
from tests.training.conftest import write_tool_set

seeds = st.integers(0, 10**9)


class Letters:
    """A reader whose vectors count letters; near texts have near vectors."""

    def tool_vectors(self, tools: list[Tool]) -> Tensor:
        return self.request_vectors([f"{tool.name} {tool.description}" for tool in tools])

    def request_vectors(self, texts: list[str]) -> Tensor:
        counts = torch.zeros(len(texts), 128)
        for line, text in enumerate(texts):
            for first, second in itertools.pairwise(text):
                counts[line, (31 * ord(first) + ord(second)) % 128] += 1
        return torch.nn.functional.normalize(counts, dim=1)


def bare(name: str, tools: tuple[Tool, ...]) -> ToolSet:
    renamed = tuple(Tool(f"{name} {tool.server}", tool.name, tool.definition) for tool in tools)
    return ToolSet(name, renamed)


@pytest.fixture(scope="module")
def corpus(tool_set: Path) -> Corpus:
    """A labelled set, and a catalogue of other servers that has the same tools once more."""
    labelled = load_set(tool_set)
    corpus = Corpus([labelled, bare("mirror", labelled.tools)], {})
    mine(corpus, Letters(), 1)  # type: ignore[arg-type]
    return corpus


def examples_of(corpus: Corpus) -> Iterator[tuple[Source, Example]]:
    return ((source, example) for source in corpus.sources for example in source.examples)


def test_a_foreign_tool_is_clearly_off_and_of_another_server(corpus: Corpus) -> None:
    vectors = Letters().tool_vectors(corpus.tools)
    seen = 0
    for _, example in examples_of(corpus):
        home = {corpus.tools[at].server for at in example.positives}
        first = example.positives[0]
        for at in example.foreign.tolist():
            seen += 1
            assert corpus.tools[at].server not in home
            assert not corpus.alike(at, example.positives)
            assert float(vectors[first] @ vectors[at]) <= FOREIGN_LIKENESS + 1e-5
            if example.text is not None:
                asked = Letters().request_vectors([example.text])[0]
                assert float(asked @ vectors[at]) <= float(asked @ vectors[first]) + FOREIGN_MARGIN + 1e-5
    assert seen > 20


@given(seeds)
def test_a_foreign_group_is_certainly_wrong_in_all(corpus: Corpus, seed: int) -> None:
    group = GroupSampler(corpus, Mixture(foreign=1.0, no_answer=0.0)).draw(random.Random(seed), 2)
    if group.positives == 0:  # most examples have a foreign catalogue
        assert all(group.sure)
        assert any(set(group.indices) <= set(each.foreign.tolist()) for _, each in examples_of(corpus))
    answered = GroupSampler(corpus, Mixture(foreign=1.0)).draw(random.Random(seed), 2, answered=True)
    assert answered.positives >= 1


@given(seeds)
def test_right_tools_are_taken_out_with_all_that_is_near_them(corpus: Corpus, seed: int) -> None:
    group = GroupSampler(corpus, Mixture(foreign=0.0, no_answer=1.0, joined=0.0)).draw(random.Random(seed), 4)
    assert group.positives == 0
    assert all(group.sure)
    owners = [each for _, each in examples_of(corpus) if each.excluded == group.excluded]
    assert any(set(group.indices).isdisjoint(each.near.tolist()) for each in owners)
    assert group.excluded.isdisjoint(group.indices)


@given(seeds)
def test_a_near_tool_is_never_certainly_wrong(corpus: Corpus, seed: int) -> None:
    sampler = GroupSampler(corpus, Mixture(foreign=0.0, no_answer=0.0, joined=0.0))
    group = sampler.draw(random.Random(seed), 6)
    assert not any(group.sure[: group.positives])
    owners = [each for _, each in examples_of(corpus) if each.excluded == group.excluded]
    near = frozenset.intersection(*(frozenset(each.near.tolist()) for each in owners))
    for at, sure in zip(group.indices, group.sure, strict=True):
        assert not (sure and at in near)


def test_a_tool_called_alike_elsewhere_is_not_certainly_wrong() -> None:
    def tool(server: str, name: str) -> Tool:
        return Tool(server, name, {"name": name, "description": "", "inputSchema": {}})

    first = ToolSet(
        "mail", (tool("a", "send_email"), tool("a", "sendEmailDraft"), tool("b", "send_email_now"))
    )
    corpus = Corpus([first], {})
    sampler, source = GroupSampler(corpus, Mixture()), corpus.sources[0]
    assert not source.exhaustive
    assert sampler._is_sure(source, frozenset([0]), 1)  # the same server's author tells them apart
    assert not sampler._is_sure(source, frozenset([0]), 2)


@given(seeds, st.floats(0.05, 0.9))
def test_a_split_keeps_every_tool_once_and_no_request_across(tool_set: Path, seed: int, share: float) -> None:
    labelled = load_set(tool_set)
    first, last = labelled.queries[0], labelled.queries[-1]
    both = Query("both", "two things at once", (*first.relevant, *last.relevant))
    whole = ToolSet(labelled.name, labelled.tools, (*labelled.queries, both))
    kept, held = split_set(whole, share, seed)
    ours, theirs = ({tool.id for tool in part.tools} for part in (kept, held))
    assert ours.isdisjoint(theirs)
    assert ours | theirs == {tool.id for tool in whole.tools}
    assert theirs
    for part, keys in ((kept, ours), (held, theirs)):
        assert all(keys.issuperset(query.relevant) for query in part.queries)
    across = [q for q in whole.queries if ours.intersection(q.relevant) and theirs.intersection(q.relevant)]
    assert len(kept.queries) + len(held.queries) == len(whole.queries) - len(across)
    assert split_set(whole, share, seed) == (kept, held)


def test_held_out_tools_are_not_trained_on_and_serve_no_stranger(tmp_path: Path) -> None:
    labelled = load_set(write_tool_set(tmp_path / "office"))
    other = bare("mirror", labelled.tools)
    kept, cases = held_out([labelled, other], {"office": 0.3, "mirror": 0.3}, seed=4, most=50)
    trained = {tool.id for each in kept for tool in each.tools}
    office, strangers = cases
    assert trained.isdisjoint(tool.id for case in cases for tool in case.tools)
    assert (office.name, strangers.name) == ("office", "strangers")
    assert set(strangers.tools) < set(office.tools)
    assert list(strangers.idle) == [query.text for query in office.queries]
    wanted = {key for query in office.queries for key in query.relevant}
    assert wanted.isdisjoint(tool.id for tool in strangers.tools)


def test_strangers_are_neither_neighbours_nor_called_alike() -> None:
    def tool(server: str, name: str) -> Tool:
        return Tool(server, name, {"name": name, "description": "", "inputSchema": {}})

    tools = (tool("a", "send_email"), tool("a", "paint"), tool("b", "email_send"), tool("b", "fly"))
    corpus = Corpus([ToolSet("mail", tools)], {})
    example = corpus.sources[0].examples[0]
    example.excluded = frozenset()
    assert _strangers(corpus, example, [0, 1, 2, 3]).tolist() == [3]


def test_snapshots_in_a_row_are_averaged() -> None:
    kept = {
        name: {"a": torch.tensor([value])} for name, value in (("1", 1.0), ("2", 2.0), ("3", 6.0), ("4", 3.0))
    }
    found = {name: float(state["a"]) for name, state in with_averages(kept).items()}
    assert found == pytest.approx({"1": 1, "2": 2, "3": 6, "4": 3, "1-3": 3, "2-4": 11 / 3, "1-4": 3})
