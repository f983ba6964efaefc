"""Why a tool was picked, in words that are true: taken from the request and the tool's own text.

`benchmarks.reasons` measures how often each kind of reason is right; see docs/quality.md.
"""

from __future__ import annotations

import re

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.lexical import document, terms

MAX_WORDS = 5
MAX_PARAMETERS = 3
MAX_SENTENCE = 160  # characters

NAMED = "The request names this tool."
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])|\s*\n\s*")


def reason(tool: Tool, query: str, score: float) -> str:
    """One sentence: what the tool says of itself that comes nearest to the request. Where that shares no
    word with it, the words that the tool's name and parameters share."""
    sentence = nearest_sentence(tool, query)
    says = f"Its own text says: {sentence}"
    if sentence and set(terms(query)).intersection(terms(sentence)):
        return says
    if shared := shared_words(tool, query):
        return shared
    if sentence:
        return says
    return f"It shares no word with the request; the model's probability that it serves is {score:.2f}."


def shared_words(tool: Tool, query: str) -> str | None:
    """None where they share none."""
    asked = list(dict.fromkeys(terms(query)))
    own = set(terms(document(tool)))
    shared = [term for term in asked if term in own][:MAX_WORDS]
    if not shared:
        return None
    words = set(asked)
    fitting = [name for name in tool.parameters if words.intersection(terms(name))][:MAX_PARAMETERS]
    takes = f" and takes {_listed(fitting)}" if fitting else ""
    return f"It shares {_listed(shared)} with the request{takes}."


def nearest_sentence(tool: Tool, query: str) -> str:
    """The sentence of the tool's description that shares most words with the request, the first of such,
    cut at `MAX_SENTENCE`; empty without a description."""
    sentences = [" ".join(part.split()) for part in _SENTENCE_END.split(tool.description)]
    asked = set(terms(query))
    best = max(filter(None, sentences), key=lambda each: len(asked.intersection(terms(each))), default="")
    return best if len(best) <= MAX_SENTENCE else best[: MAX_SENTENCE - 1].rsplit(" ", 1)[0] + "…"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
