"""Random changes to requests and tools that must not change which tool is right.

Every function draws from the caller's generator alone, so a seed fixes the outcome.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.prompts import words_of
from mcp_discovery.training.synthesis import first_sentence

OPENINGS = (
    "please ",
    "hi, ",
    "hello! ",
    "hey ",
    "ok so ",
    "quick one: ",
    "can you help? ",
    "I need your help. ",
    "Hi there. ",
    "Sorry to bother you, but ",
)
CLOSINGS = (
    " please",
    " thanks",
    " Thank you!",
    " asap",
    " when you get a chance",
    " - it's urgent",
    ", if possible",
    " Let me know once it is done.",
    " I appreciate it.",
    " Use whatever tool fits.",
)
ASIDES = (
    "I have a meeting in ten minutes.",
    "My colleague asked for this yesterday.",
    "It has been a long week.",
    "The last attempt did not work.",
    "I already tried doing it by hand.",
    "We are in the middle of a busy quarter.",
    "Keep the answer short.",
    "I am writing this from my phone.",
    "Don't change anything else.",
    "My boss wants it by Friday.",
    "I am new to this.",
    "No rush on the other things we talked about.",
    "Yesterday I read about it in the news.",
    "It does not have to be perfect.",
)
JOINERS = (
    " and ",
    " and then ",
    ". Then ",
    ". Also, ",
    ". After that, ",
    "; ",
    ". Additionally, ",
    ", plus ",
)
SWAPS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(rf"\b{word}\b", re.I), choices)
    for word, choices in {
        "find": ("look for", "locate", "search for"),
        "show me": ("let me see", "display", "give me"),
        "create": ("make", "set up", "add"),
        "delete": ("remove", "get rid of", "erase"),
        "remove": ("delete", "take out"),
        "update": ("change", "edit", "modify"),
        "search for": ("look for", "find"),
        "get": ("fetch", "pull up", "retrieve"),
        "calculate": ("work out", "compute", "figure out"),
        "send": ("shoot", "forward", "deliver"),
        "schedule": ("set up", "book", "plan"),
        "list": ("show", "give me", "enumerate"),
        "provide me with": ("give me", "get me"),
        "i would like to": ("I want to", "I'd like to", "I need to"),
        "i need to": ("I have to", "I want to", "gotta"),
        "can you": ("could you", "would you", "please"),
        "could you please": ("can you", "please", ""),
        "what is": ("what's", "tell me"),
        "retrieve": ("get", "fetch"),
        "picture": ("photo", "image"),
        "movie": ("film",),
        "meeting": ("call", "appointment"),
        "message": ("note", "text"),
    }.items()
)


def augmented_query(text: str, rng: random.Random, strength: float = 1.0) -> str:
    """`text` with typos, other words, other letter case, politeness or an aside; often unchanged."""

    def happens(chance: float) -> bool:
        return rng.random() < chance * strength

    if happens(0.25):
        text = swapped_words(text, rng)
    if happens(0.08):
        text = rng.choice(OPENINGS) + text
    if happens(0.08):
        text = text.rstrip(" .") + rng.choice(CLOSINGS)
    if happens(0.07):
        aside = rng.choice(ASIDES)
        text = f"{aside} {text}" if rng.random() < 0.5 else f"{text.rstrip('. ')}. {aside}"
    if happens(0.10):
        text = with_typos(text, rng)
    if happens(0.15):
        text = text.lower()
    elif happens(0.03):
        text = text.upper()
    if happens(0.08):
        text = text.rstrip(".?! ")
    return text


def swapped_words(text: str, rng: random.Random) -> str:
    """Up to two common phrases replaced by others of the same sense."""
    found = [(pattern, choices) for pattern, choices in SWAPS if pattern.search(text)]
    for pattern, choices in rng.sample(found, min(len(found), 2)):
        text = pattern.sub(rng.choice(choices), text, count=1)
    return text


def with_typos(text: str, rng: random.Random) -> str:
    """One to three slips of a typist in words of four letters or more."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    for i in rng.sample(long, min(len(long), rng.choice((1, 1, 2, 3)))):
        word, at = words[i], rng.randrange(1, len(words[i]) - 1)
        words[i] = rng.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + word[at + 1] + word[at] + word[at + 2 :],
                word[:at] + rng.choice("etaoinsrhl") + word[at + 1 :],
            )
        )
    return " ".join(words)


def joined_queries(first: str, second: str, rng: random.Random) -> str:
    """Two requests as one."""
    joiner = rng.choice(JOINERS)
    if joiner[0] in ".;":
        second = second[:1].upper() + second[1:] if joiner[-2:] == ". " else second
    else:
        second = second[:1].lower() + second[1:]
    return first.rstrip(".?!; ") + joiner + second


def styled_name(name: str, rng: random.Random) -> str:
    """A tool's name as someone may type it: camel, snake, kebab, dotted or as words."""
    words = words_of(name).split()
    camel = "".join(word.capitalize() for word in words)
    return rng.choice(
        (
            camel[:1].lower() + camel[1:],
            camel,
            "_".join(words),
            "-".join(words),
            ".".join(words),
            " ".join(words),
        )
    )


def augmented_tool(tool: Tool, rng: random.Random, without_first: float, strength: float = 1.0) -> Tool:
    """`tool` with a field left out now and then.

    `without_first` is the chance that its description loses its first sentence: a request made up
    from that sentence must not be found by repeating it. The same chance goes to wrong tools, so that
    a missing sentence tells nothing.
    """
    if rng.random() < without_first:
        return _with(tool, description=first_sentence(tool.description)[1])
    roll = rng.random() / strength if strength else 1.0
    if roll < 0.05:
        return _with(tool, description="")
    if roll < 0.13:
        return _with(tool, description=first_sentence(tool.description)[0])
    if roll < 0.21:
        return _with(tool, inputSchema={})
    if roll < 0.29:
        return replace(tool, server="")
    return tool


def _with(tool: Tool, **changed: object) -> Tool:
    return replace(tool, definition={**tool.definition, **changed})
