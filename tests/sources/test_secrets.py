"""What a server is given to prove itself is neither logged, shown nor stored."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery.sources.specs import HIDDEN, SHORTEST_SECRET, Spec, Unreachable, parse
from mcp_discovery.discovery.sources.stored import ListStore
from tests.sources.http_server import HttpServer
from tests.sources.world import SERVER, StdioServer, definition, following, mcp_json

SECRETS = ("s3cr3t-in-env", "s3cr3t literal&value", "s3cr3t-header", "s3cr3t-query", "s3cr3t-password")


def test_no_secret_is_logged_shown_or_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    environment = {"KEY": SECRETS[0], "HEADER": SECRETS[2], "QUERY": SECRETS[3]}
    env = {"KEY": "${KEY}", "LITERAL": SECRETS[1]}
    loud = {"echo": ["KEY", "LITERAL"], "prints": f"starting with {SECRETS[0]}"}
    works = StdioServer(tmp_path, "works", [definition("a")], **loud)
    ends = StdioServer(tmp_path, "ends", exit=True, **loud)

    async def test() -> None:
        async with HttpServer([definition("a")], token="another").running() as refusing:
            servers: dict[str, Any] = {
                "works": {**works.entry, "env": env},
                "ends": {**ends.entry, "env": env},
                "absent": {"command": "/nowhere/${KEY}", "env": env},
                "refused": {"url": refusing.url, "headers": {"Authorization": "Bearer ${HEADER}"}},
                "gone": {"url": f"http://me:{SECRETS[4]}@127.0.0.1:1/mcp?key=${{QUERY}}"},
                "bad": {"command": str(SERVER), "args": ["${KEY}"], "cwd": "${KEY}"},
            }
            store = ListStore(tmp_path / "lists")
            path = mcp_json(tmp_path, servers)
            async with following([path], environment=environment, store=store) as seen:
                await seen.until_ids("works/a")
                await seen.sources.tried()
                for server in ("ends", "absent", "refused", "gone", "bad"):
                    assert any(state.server == server for state in seen.last.states)
                    assert await seen.until_presence(server, "missing")
                shown = repr([seen.catalogues, seen.sources.states(), seen.sources.problems])
                told.append(shown)

    told: list[str] = []
    asyncio.run(test())
    stored = b"".join(file.read_bytes() for file in (tmp_path / "lists").iterdir()).decode()
    logged = "\n".join(f"{record.getMessage()} {record.exc_text}" for record in caplog.records)
    assert HIDDEN in logged  # the servers' own words came through, without the secrets
    assert "works" in stored
    for secret in SECRETS:
        for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1]):
            assert form not in told[0] + stored + logged


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=SHORTEST_SECRET, max_size=20),
    st.text(max_size=20),
    st.text(max_size=20),
)
def test_a_secret_is_taken_out_of_any_text(secret: str, before: str, after: str) -> None:
    entry = {"command": "x", "env": {"KEY": "${KEY}"}, "args": ["--key=${KEY}"]}
    spec = parse("one", entry, "mcp.json", {"KEY": secret})
    assert isinstance(spec, Spec)
    if secret not in before + HIDDEN + after:
        assert secret not in spec.redact(f"{before}{secret}{after}").replace(HIDDEN, "\0")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, 'a "command" or a "url"'),
        (5, "must be an object"),
        ({"command": ""}, "must not be empty"),
        ({"command": "x", "args": "y"}, "list of texts"),
        ({"command": "x", "args": [5]}, '"args" must be text'),
        ({"command": "x", "env": ["A"]}, '"env" must be an object'),
        ({"command": "x", "env": {"A": None}}, "must be text"),
        ({"command": "x", "env": {"A": "${NONE}"}}, "variable NONE is not set"),
        ({"command": "x", "env": {"A": "${input:key}"}}, "only ${VARIABLE}"),
        ({"url": "ftp://a"}, "http://"),
        ({"url": "https://"}, "name a host"),
        ({"type": "sse", "url": "https://a/sse"}, "'sse' is not supported"),
        ({"url": "https://a", "headers": {"A": "b\nc"}}, "printable ASCII"),
    ],
)
def test_an_entry_that_cannot_be_started_says_why(entry: Any, words: str) -> None:
    found = parse("one", entry, "mcp.json", {})
    assert isinstance(found, Unreachable)
    assert words in found.problem.sentence


def test_variables_are_filled_in_with_defaults_where_there_are() -> None:
    entry = {"command": "${A}", "args": ["${B:-two}", "${env:A}x"], "env": {"N": 5, "E": "${C:-}"}}
    spec = parse("one", entry, "mcp.json", {"A": "one"})
    assert isinstance(spec, Spec)
    assert spec.endpoint.command == "one"  # type: ignore[union-attr]
    assert spec.endpoint.args == ("two", "onex")  # type: ignore[union-attr]
    assert spec.endpoint.env == {"N": "5", "E": ""}  # type: ignore[union-attr]


def test_the_identity_depends_on_what_is_configured_and_not_on_secrets() -> None:
    entry = {"command": "x", "args": ["${KEY}"], "env": {"KEY": "${KEY}"}}
    one, two = (parse("one", entry, "mcp.json", {"KEY": key}) for key in ("first", "second"))
    other = parse("one", {**entry, "args": ["y"]}, "mcp.json", {"KEY": "first"})
    assert isinstance(one, Spec)
    assert isinstance(two, Spec)
    assert isinstance(other, Spec)
    assert one.identity == two.identity != other.identity
    assert one != two  # a new secret starts the server anew
