"""What makes a tool's definition acceptable, and what makes it suspicious.

An unacceptable definition is kept out, since a client could not use it or an answer could not carry
it. A suspicious one is served and reported: only people can tell an attack from an odd text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for

from mcp_discovery.discovery.catalogue import Tool, canonical

MAX_NAME = 256  # characters
MAX_DEFINITION_BYTES = 256 * 1024
LARGE_DEFINITION_BYTES = 16 * 1024
MAX_DEPTH = 64

# Draft 7 first: its meta-schema checks five times faster, and accepts nearly all that 2020-12 accepts.
_DIALECTS = tuple(
    dialect(dialect.META_SCHEMA) for dialect in (Draft7Validator, Draft202012Validator, Draft4Validator)
)
_TYPES = (
    ("title", str, "text"),
    ("description", str, "text"),
    ("annotations", dict, "an object"),
    ("outputSchema", dict, "an object"),
)
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\U000e0000-\U000e007f]")
_TEMPLATE = re.compile(r"<\|[^|<>]{1,40}\|>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>")
_ORDERS = re.compile(
    r"ignore (?:all |any )?(?:the )?(?:previous|prior|above|other)|<important>"
    r"|always (?:choose|pick|select|prefer) (?:me|this)|do not (?:tell|mention|inform) (?:the|this)",
    re.IGNORECASE,
)


def unacceptable(tool: Tool) -> str | None:
    """Why this definition cannot be served, as one sentence; None where it can."""
    definition = tool.definition
    for label, value in (("server", tool.server), ("name", tool.name)):
        if sentence := _bad_name(label, value):
            return sentence
    for key, kind, words in _TYPES:
        member = definition.get(key)
        if member is not None and not isinstance(member, kind):
            return f"{key} must be {words}, it is {_kind(member)}."
    if _deeper_than(definition, MAX_DEPTH):
        return f"the definition is nested deeper than {MAX_DEPTH} levels."
    try:
        size = len(canonical(definition))
    except ValueError:
        return "the definition holds a number or text that JSON in UTF-8 cannot carry."
    if size > MAX_DEFINITION_BYTES:
        return f"the definition takes {size:,} bytes; at most {MAX_DEFINITION_BYTES:,} are served."
    return _bad_schemas(definition)


def suspicions(tool: Tool) -> Iterator[str]:
    """What people should look at, one sentence each; the tool is served."""
    size = len(canonical(tool.definition))
    if size > LARGE_DEFINITION_BYTES:
        yield f"the definition takes {size:,} bytes, about {size // 4:,} tokens of an answer."
    if not tool.description.strip():
        yield "it has no description, so it can be found by its name and parameters only."
    text = "\n".join(_texts(tool.definition))
    if match := _INVISIBLE.search(text):
        yield f"its text holds the invisible character U+{ord(match[0]):04X}."
    if match := _TEMPLATE.search(text):
        yield f"its text holds the chat-template token {match[0]!r}."
    if match := _ORDERS.search(text):
        yield f"its text gives orders to its reader: {match[0]!r}."


def _bad_name(label: str, value: object) -> str | None:
    if not isinstance(value, str) or not value.strip():
        return f"{label} must be text that is not empty, it is {_kind(value)}."
    if len(value) > MAX_NAME:
        return f"{label} has {len(value):,} characters; at most {MAX_NAME} are served."
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in value):
        return f"{label} holds a control character."
    return None


def _bad_schemas(definition: Mapping[str, Any]) -> str | None:
    schema = definition.get("inputSchema")
    if not isinstance(schema, dict):
        return f"inputSchema must be an object, it is {_kind(schema)}."
    if schema.get("type") != "object":
        return f'inputSchema must have "type": "object", it has {schema.get("type")!r:.40}.'
    for key in ("inputSchema", "outputSchema"):
        schema = definition.get(key)
        if schema is not None and (reason := _not_a_schema(schema)):
            return f"{key} is not a valid JSON Schema: {reason}."
    return None


def _not_a_schema(schema: dict[str, Any]) -> str | None:
    """None where the declared dialect or one in common use accepts it. References are not followed."""
    declared = validator_for(schema, default=Draft202012Validator)
    errors = (next(dialect.iter_errors(schema), None) for dialect in _DIALECTS)
    if any(error is None for error in errors):
        return None
    error = next(iter(declared(declared.META_SCHEMA).iter_errors(schema)), None)
    if error is None:
        return None
    where = "/".join(map(str, error.absolute_path)) or "root"
    return f"at {where:.120}, {error.message:.120}"


def _deeper_than(value: object, most: int) -> bool:
    level: list[object] = [value]
    for _ in range(most + 1):
        if not level:
            return False
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
    return bool(level)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _kind(value: object) -> str:
    names = {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "missing or null" if value is None else "empty" if value == "" else names.get(type(value), "text")
