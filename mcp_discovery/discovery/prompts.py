"""The prompts of the discovery model: how a tool and a query become tokens.

Tool first, query last, so that a tool's part is a prefix that every request shares:

    prefix   <|im_start|>system\\n{instruction}<|im_end|>\\n<|im_start|>user\\nTool: {tool text}{fill}
    suffix   \\nRequest: {query}<|im_end|>\\n<|im_start|>assistant\\n
    query    <|im_start|>user\\nRequest: {query}<|im_end|>\\n<|im_start|>assistant\\n

The score of (tool, query) is P(yes) against P(no) after prefix + suffix. A tool's vector is the
hidden state at the end of its prefix, a query's that at the end of the query prompt.

A prefix always ends on a page boundary: the last page is filled with more of the tool's own text
(its parameters' descriptions) as far as there is any, then with line feeds. So a row recomputes
nothing of the tool, and the pages of a prefix are shared whole.

Text is encoded with the special tokens switched off: a chat-template token inside a query or a
description stays text. `VERSION` names this template; an adapter is trained for one version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ModelError

VERSION = "1"
INSTRUCTION = "Does the tool serve the request? Answer yes or no."
POSITIVE, NEGATIVE = "yes", "no"
MAX_QUERY_TOKENS = 256
MAX_PREFIX_TOKENS = 128
MAX_PARAMETER_TOKENS = 32
MAX_NAME_TOKENS = 32

_WORD_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\-./:\s]+")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; never a special token, whatever the text says."""
        ...

    def special(self, token: str) -> int:
        """The id of a special token such as `<|im_start|>`."""
        ...


class Describable(Protocol):
    """What a prompt reads of a tool."""

    @property
    def server(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str | None: ...
    @property
    def description(self) -> str: ...
    @property
    def input_schema(self) -> Mapping[str, Any]: ...


def words_of(name: str) -> str:
    """A name as words, split at case, `_ - . / :` and white space: `addPerson` is `add person`."""
    return " ".join(part.lower() for part in _WORD_BREAKS.split(name) if part)


@dataclass(frozen=True, slots=True)
class CutQuery:
    tokens: tuple[int, ...]
    truncated: bool


class Prompts:
    """Builds the prompts for one tokenizer and one page size. Stateless."""

    def __init__(self, tokenizer: Tokenizer, page_tokens: int = 16) -> None:
        self._encode = tokenizer.encode
        self.page_tokens = page_tokens
        start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
        line = tokenizer.encode("\n")
        if len(line) != 1:
            raise ModelError("the model's tokenizer has no single token for a line feed; use another model")
        self._line = line[0]
        answer = [end, *line, start, *tokenizer.encode("assistant\n")]
        system = [start, *tokenizer.encode("system\n" + INSTRUCTION), end, *line]
        self._prefix_head = [*system, start, *tokenizer.encode("user\nTool:")]
        self._suffix_head = tokenizer.encode("\nRequest:")
        self._query_head = [start, *tokenizer.encode("user\nRequest:")]
        self._tail = answer
        self.positive = self._one_token(POSITIVE)
        self.negative = self._one_token(NEGATIVE)
        self.max_prefix_tokens = MAX_PREFIX_TOKENS // page_tokens * page_tokens or page_tokens * -(
            -MAX_PREFIX_TOKENS // page_tokens
        )

    def _one_token(self, word: str) -> int:
        tokens = self._encode(word)
        if len(tokens) != 1:
            raise ModelError(f"the model's tokenizer has no single token for {word!r}; use another model")
        return tokens[0]

    def prefix(self, tool: Describable) -> tuple[int, ...]:
        """The tool's part of the prompt, a whole number of pages, at most `max_prefix_tokens`."""
        room = self.max_prefix_tokens - len(self._prefix_head)
        name = self._encode(f" {words_of(tool.server)}: {words_of(tool.name)}")[:MAX_NAME_TOKENS]
        properties = tool.input_schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        names = ", ".join(words_of(str(key)) for key in properties)
        parameters = self._encode(f"\nParameters: {names}")[:MAX_PARAMETER_TOKENS] if names else []
        text = " ".join((tool.description or tool.title or "").split())
        description = self._encode(f"\n{text}") if text else []
        description = _cut(description, room - len(name) - len(parameters), head=3, of=4)
        tokens = (self._prefix_head + name + description + parameters)[: self.max_prefix_tokens]
        gap = -len(tokens) % self.page_tokens
        if gap:
            details = "; ".join(
                f"{words_of(str(key))}: {' '.join(str(value['description']).split())}"
                for key, value in properties.items()
                if isinstance(value, Mapping) and value.get("description")
            )
            more = self._encode(f"\n{details[: 16 * self.page_tokens]}")[:gap] if details else []
            tokens = tokens + more + [self._line] * (gap - len(more))
        return tuple(tokens)

    def cut(self, query: str) -> CutQuery:
        """The query's tokens, cut at `MAX_QUERY_TOKENS` with head and tail kept."""
        tokens = self._encode(" " + " ".join(query.split()))
        return CutQuery(tuple(_cut(tokens, MAX_QUERY_TOKENS, head=1, of=2)), len(tokens) > MAX_QUERY_TOKENS)

    def suffix(self, query: CutQuery) -> tuple[int, ...]:
        return (*self._suffix_head, *query.tokens, *self._tail)

    def query(self, query: CutQuery) -> tuple[int, ...]:
        return (*self._query_head, *query.tokens, *self._tail)


def _cut(tokens: list[int], most: int, *, head: int, of: int) -> list[int]:
    """At most `most` tokens: the first `head / of` of them and the last rest."""
    if len(tokens) <= most:
        return tokens
    if most <= 0:
        return []
    first = most * head // of
    return tokens[:first] + tokens[len(tokens) - (most - first) :]
