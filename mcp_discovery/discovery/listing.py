"""Choosing by writing: a chat model reads all candidates at once and lists the numbers of those that serve.

    <|im_start|>system\\n{instruction}<|im_end|>\\n
    <|im_start|>user\\nTools:\\n1. {tool}\\n2. {tool}\\n...\\nRequest: {query}<|im_end|>\\n
    <|im_start|>assistant\\n{think}

and the answer is numbers with commas between, most fitting first, or 0. The engine decodes it under a
constraint that can write nothing else. A model that thinks first (it has the special tokens `<think>` and
`</think>`) is given an empty thought.

Text is encoded with the special tokens switched off: a chat-template token inside a query or a
description stays text.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ModelError
from engine.request import Generate
from engine.wire import ItemList
from mcp_discovery.discovery.prompts import CutQuery, Describable, Tokenizer, words_of

INSTRUCTION = (
    "You choose tools. Answer with the numbers of the tools that serve the request, the most fitting first, "
    "separated by commas, and nothing else. Answer 0 if none of them serves it."
)
NONE = "0"
MAX_TOOL_TOKENS = 56


class Listing:
    """Builds the requests of one tokenizer and reads their answers. Stateless."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        encode = tokenizer.encode
        start, self._end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
        line = encode("\n")
        self._encode = encode
        self._head = (start, *encode(f"system\n{INSTRUCTION}"), self._end, *line)
        self._user = (start, *encode("user\nTools:"))
        self._tail = (self._end, *line, start, *encode("assistant\n"), *_no_thought(tokenizer))
        self._comma = tuple(encode(","))

    def request(self, tools: Sequence[Describable], query: CutQuery, most: int) -> Generate:
        """For `most` of `tools` at most; the instruction stays cached."""
        numbered = [token for place, tool in enumerate(tools, 1) for token in self._line(place, tool)]
        tokens = (
            *self._head,
            *self._user,
            *numbered,
            *self._encode("\nRequest:"),
            *query.tokens,
            *self._tail,
        )
        items = self._items(len(tools))
        most = min(most, len(tools))
        longest = max(map(len, items)) + len(self._comma)
        return Generate(
            tokens,
            max_tokens=most * longest + 1,
            stop=frozenset([self._end]),
            constraint=ItemList(items, self._end, self._comma, most),
            keep=len(self._head),
        )

    def places(self, output: Sequence[int], tools: int) -> list[int]:
        """The numbers that an answer under the constraint lists, from 1 to `tools`; those before a 0."""
        numbers = {item: number for number, item in enumerate(self._items(tools))}
        found: list[int] = []
        rest = tuple(output)
        while rest:
            item = max((item for item in numbers if rest[: len(item)] == item), key=len, default=None)
            if item is None or numbers[item] == 0:
                break
            found.append(numbers[item])
            rest = rest[len(item) + len(self._comma) :]
        return found

    def _items(self, tools: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._encode(str(number))) for number in range(tools + 1))

    def _line(self, place: int, tool: Describable) -> list[int]:
        description = " ".join((tool.description or tool.title or "").split())
        named = f"\n{place}. {words_of(tool.server)}: {words_of(tool.name)}"
        return self._encode(f"{named}. {description}" if description else named)[:MAX_TOOL_TOKENS]


def _no_thought(tokenizer: Tokenizer) -> list[int]:
    try:
        begin, end = tokenizer.special("<think>"), tokenizer.special("</think>")
    except ModelError:
        return []
    return [begin, *tokenizer.encode("\n\n"), end, *tokenizer.encode("\n\n")]
