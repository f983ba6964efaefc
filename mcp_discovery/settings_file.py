"""Adding to the settings file without touching what else stands in it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError

_TABLE = re.compile(r"^\[catalog\][ \t]*(?:#.*)?$", re.MULTILINE)
_LIST = r"""\[(?:[^\[\]"'#]|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*)*\]"""
_NEXT_TABLE = re.compile(r"^\[", re.MULTILINE)


def with_catalogue(text: str, paths: Sequence[str], urls: Sequence[str]) -> str:
    """TOML `text` with `paths` and `urls` added to `[catalog]`; those that it has are not repeated.

    Raises `ConfigError` where it cannot be done without rewriting what a person wrote.
    """
    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings are not valid TOML: {error}") from None
    table = wanted.setdefault("catalog", {})
    for key, values in (("urls", urls), ("paths", paths)):
        held = table.get(key, []) if isinstance(table, dict) else None
        if not isinstance(held, list):
            raise ConfigError(f"catalog.{key} of the settings is no list; add {list(values)} by hand")
        new = [value for value in values if value not in held]
        if new:
            table[key] = [*held, *new]
            text = _with_key(text, key, table[key])
    try:
        is_right = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise ConfigError(f"[catalog] of the settings is of a form of its own; make it {table} by hand")
    return text


def _with_key(text: str, key: str, value: list[Any]) -> str:
    """`text` with `key = value` in `[catalog]`, in place of what the key had."""
    line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    table = _TABLE.search(text)
    if table is None:
        before = text.rstrip("\n")
        return f"{before}\n\n[catalog]\n{line}\n" if before else f"[catalog]\n{line}\n"
    following = _NEXT_TABLE.search(text, table.end())
    end = len(text) if following is None else following.start()
    body = text[table.end() : end]
    present = re.compile(rf"^[ \t]*{key}[ \t]*=[ \t]*{_LIST}", re.MULTILINE)
    body = present.sub(lambda _: line, body, count=1) if present.search(body) else f"\n{line}{body}"
    return text[: table.end()] + body + text[end:]
