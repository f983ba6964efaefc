"""`call QUERY`: a client of a running server, with the official SDK over TLS."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from engine.errors import ConfigError, RefusalCode
from mcp_discovery.commands.common import printable, settings, table, url_host
from mcp_discovery.config import Config
from mcp_discovery.exits import NO_MATCH, OK, REQUEST_REFUSED, UNEXPECTED, USAGE, CommandFailed
from mcp_discovery.transport.tls import client_context

CODES = {
    "matched": OK,
    "partial": OK,
    "no_match": NO_MATCH,
    "refused": REQUEST_REFUSED,
    "failed": UNEXPECTED,
    "invalid": USAGE,
}
ARGUMENTS = (
    "query",
    "limit",
    "detail",
    "servers",
    "exclude",
    "names",
    "max_response_tokens",
    "min_score",
    "timeout_ms",
)
FLAGS = ("read_only", "explain")
MARGIN_S = 10.0  # beyond the call's own timeout, for the network


def run(arguments: argparse.Namespace) -> int:
    config = settings(arguments)
    if not arguments.query and not arguments.names:
        raise ConfigError("give a query, or a tool's name with --name")
    url = arguments.url or f"https://{url_host(config.server.host)}:{config.server.port}/mcp"
    _check(arguments, url)
    result = asyncio.run(_call(arguments, url, config))
    if arguments.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(result)))
    return CODES.get(result.get("status", ""), UNEXPECTED)


def _check(arguments: argparse.Namespace, url: str) -> None:
    """Raises `ConfigError` for what no request can be made of; ranges are for the server to judge."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port, or a bracket
        usable = False
    if not usable:
        raise ConfigError(f"--url must be an address such as https://127.0.0.1:8443/mcp, it is {url!r}")
    token = arguments.token or ""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("--token must be printable ASCII")
    if arguments.min_score is not None and not math.isfinite(arguments.min_score):
        raise ConfigError(f"--min-score must be a number from 0 to 1, it is {arguments.min_score}")
    lists = (arguments.names, arguments.exclude, arguments.servers)
    text = "".join([arguments.query or "", *(item for items in lists for item in items or ())])
    # What the system could not decode arrives as lone surrogates.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError("the query and the names of tools and servers must be UTF-8 text")


async def _call(arguments: argparse.Namespace, url: str, config: Config) -> dict[str, Any]:
    """The call's structured result."""
    values = {name: getattr(arguments, name) for name in ARGUMENTS}
    chosen = {name: value for name, value in values.items() if value not in (None, "")}
    chosen |= {name: True for name in FLAGS if getattr(arguments, name)}
    timeout = max(0, arguments.timeout_ms) / 1000 + MARGIN_S
    context = client_context(_authority(arguments.ca, config), arguments.cert, arguments.key)
    headers = {"authorization": f"Bearer {arguments.token}"} if arguments.token else {}
    try:
        async with (
            httpx2.AsyncClient(verify=context, headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(url, http_client=http), read_timeout_seconds=timeout) as client,
        ):
            result = await client.call_tool("discover_tools", chosen)
    except (ExceptionGroup, httpx2.HTTPError, MCPError, OSError) as error:
        raise CommandFailed(_reason(error, url)) from error
    structured = result.structured_content
    if not isinstance(structured, dict):
        raise CommandFailed(f"{url} answered without a structured result; is it mcp-discovery?")
    return structured


def _authority(given: Path | None, config: Config) -> Path | None:
    """The authority's file; None (the system's authorities) where none is given and ours is not there."""
    return given or (config.tls.ca if config.tls.ca.is_file() else None)


def _reason(error: BaseException, url: str) -> str:
    """One sentence about what went wrong at the bottom of an exception's groups and causes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = printable(str(error)) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{url} shows a certificate that is not trusted; give its authority with --ca"
    if isinstance(error, httpx2.ConnectError):
        return f"cannot reach {url}: {text}; is the server running (`mcp-discovery serve`)?"
    return f"{url} did not answer the call: {text}"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    status = str(result.get("status"))
    tools = result.get("tools") or []
    if tools:
        yield table(map(_row, tools), ("#", "score", "tool", "description"))
    for kind in ("refusal", "error"):
        problem = result.get(kind)
        if problem:
            yield f"{status}: {problem['code']}: {printable(problem['message'])}"
    refusal = result.get("refusal")
    if refusal:
        yield (
            f"pages needed {refusal['pages_needed']}, free {refusal['pages_free']}, "
            f"of {refusal['pages_total']}; short {refusal['page_deficit']}; "
            f"queue {refusal['queue_depth']}; {_retry(refusal)}"
        )
    if status == "no_match":
        yield "no tool of the catalogue serves this"
    if result.get("note"):
        yield printable(result["note"])
    yield _footer(result)


def _row(tool: dict[str, Any]) -> tuple[str, str, str, str]:
    description = tool.get("reason") or tool.get("description") or ""
    return str(tool["rank"]), f"{tool['score']:.2f}", printable(tool["id"]), printable(description)


def _footer(result: dict[str, Any]) -> str:
    catalogue, timing = result.get("catalog") or {}, result.get("timing_ms") or {}
    missing = catalogue.get("servers_missing") or []
    parts = [f"{catalogue.get('tools', 0):,} tools searched in {timing.get('total', 0):,.0f} ms"]
    if missing:
        parts.append(f"missing servers: {', '.join(map(printable, missing))}")
    if result.get("truncated"):
        parts.append("definitions were cut to fit")
    return "; ".join(parts)


def _retry(refusal: dict[str, Any]) -> str:
    if refusal["code"] == RefusalCode.REQUEST_TOO_LARGE:
        return "never retry"
    after = refusal["retry_after_ms"]
    return "retry later" if after is None else f"retry after {after:,.0f} ms"
