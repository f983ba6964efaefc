"""The very same tool on several servers: ranked once, told with all its servers."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.discovery.twins import Twins
from mcp_discovery.tool import DiscoverTool
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import discovery_over, tool

FORMS = st.lists(st.integers(0, 4).map(lambda n: hashlib.sha256(bytes([n])).digest()), max_size=20)


@given(FORMS, st.randoms(use_true_random=False))
def test_of_each_group_that_is_shown_the_first_one_is_kept(forms, random) -> None:  # type: ignore[no-untyped-def]
    twins = Twins(forms)
    mask = np.array([random.random() < 0.6 for _ in forms], dtype=bool)
    before = mask.copy()
    firsts = twins.firsts(mask)
    shown = [position for position in range(len(forms)) if mask[position]]
    expected = [p for p in shown if forms[p] not in {forms[q] for q in shown if q < p}]
    assert np.flatnonzero(firsts).tolist() == expected
    assert (mask == before).all()
    assert twins.once(shown) == expected
    for position, form in enumerate(forms):
        assert list(twins.of(position)) == [other for other, held in enumerate(forms) if held == form]


def ask(discovery: Discovery, query: str, caller: Caller | None = None) -> DiscoverResult:
    return asyncio.run(discovery.discover(DiscoverRequest(query), caller or Caller()))


TWINS = [
    tool("home", "search", "Search the notes"),
    tool("work", "search", "Search the notes"),
    tool("web", "search", "Search the web"),
    tool("mail", "send", "Send a mail"),
]


def test_twins_take_one_place_and_all_their_servers_are_told() -> None:
    discovery, engine = discovery_over(TWINS)
    result = ask(discovery, "look through notes or the web")
    also = {pick.tool.id: pick.also_on for pick in result.picks}
    assert also == {"home/search": ("work",), "web/search": (), "mail/send": ()}
    assert len(engine.scored_prefixes) == 3


def test_a_name_gives_twins_once_and_the_one_that_is_meant() -> None:
    discovery, _ = discovery_over(TWINS)
    named = [(pick.tool.id, pick.also_on) for pick in ask(discovery, "search").picks if pick.score == 1.0]
    assert named == [("home/search", ("work",)), ("web/search", ())]
    assert ask(discovery, "work/search").picks[0].tool.id == "work/search"


def test_a_twin_that_the_caller_may_not_see_is_neither_ranked_nor_told() -> None:
    discovery, _ = discovery_over(TWINS)
    result = ask(discovery, "look through notes", Caller("x", lambda server, name: server != "home"))
    also = {pick.tool.id: pick.also_on for pick in result.picks}
    assert also["work/search"] == ()
    assert "home/search" not in also
    result = ask(discovery, "look through notes", Caller("x", lambda server, name: server != "work"))
    assert {pick.tool.id: pick.also_on for pick in result.picks}["home/search"] == ()


def test_the_answer_says_which_servers_have_it_and_which_do_not_answer() -> None:
    discovery, _ = discovery_over(TWINS)
    discovery.replace(discovery.index(Catalogue.of(TWINS, servers_stale=["mail", "unseen"])))
    result = asyncio.run(DiscoverTool(discovery).call({"query": "home/search"}, Caller()))
    body, text = result.structured_content, result.content[0].text  # type: ignore[union-attr]
    assert isinstance(body, dict)
    assert body["tools"][0]["also_on"] == ["work"]
    assert body["catalog"]["servers_stale"] == ["mail"]
    assert body["status"] == "matched"
    assert "the same tool on: work" in text
    assert "not answering at present, searched as last known: mail" in text
