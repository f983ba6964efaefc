"""Why a tool was picked, in words that are true: taken from the request and the tool's own text."""

from __future__ import annotations

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.lexical import document, terms

MAX_WORDS = 5
MAX_PARAMETERS = 3

NAMED = "The request names this tool."


def reason(tool: Tool, query: str, score: float) -> str:
    """One sentence: the words that request and tool share, and the parameters that the request speaks of."""
    asked = list(dict.fromkeys(terms(query)))
    own = set(terms(document(tool)))
    shared = [term for term in asked if term in own][:MAX_WORDS]
    if not shared:
        return f"It shares no word with the request; the model's probability that it serves is {score:.2f}."
    words = set(asked)
    fitting = [name for name in tool.parameters if words.intersection(terms(name))][:MAX_PARAMETERS]
    takes = f" and takes {_listed(fitting)}" if fitting else ""
    return f"It shares {_listed(shared)} with the request{takes}."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
