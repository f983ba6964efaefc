"""Live servers over Streamable HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from tests.sources.http_server import HttpServer
from tests.sources.world import QUICK, definition, following, mcp_json, state_of


def test_a_server_is_listed_with_its_headers_and_tells_of_changes(tmp_path: Path) -> None:
    async def test() -> None:
        async with HttpServer([definition("a")], token="of-the-environment").running() as server:
            entry = {"type": "http", "url": server.url, "headers": {"Authorization": "Bearer ${TOKEN}"}}
            environment = {"TOKEN": "of-the-environment"}
            async with following([mcp_json(tmp_path, {"web": entry})], environment=environment) as seen:
                await seen.until_ids("web/a")
                server.tools.append(definition("b"))
                await server.tell()
                await seen.until_ids("web/a", "web/b")

    asyncio.run(test())


def test_one_server_is_given_by_its_url_alone() -> None:
    async def test() -> None:
        server = HttpServer([definition("a")])
        async with server.running(), following([], [server.url]) as seen:
            name = server.url.split("/")[2]
            await seen.until_ids(f"{name}/a")

    asyncio.run(test())


def test_a_server_that_refuses_is_told_of_with_its_status(tmp_path: Path) -> None:
    async def test() -> None:
        async with HttpServer([definition("a")], token="right-token").running() as server:
            entry = {"url": server.url, "headers": {"Authorization": "Bearer wrong-token"}}
            async with following([mcp_json(tmp_path, {"web": entry})]) as seen:
                await seen.until(lambda now: "HTTP status 401" in state_of(now, "web").error)
                server.token = None
                await seen.until_ids("web/a")

    asyncio.run(test())


def test_a_server_that_stops_is_stale_and_comes_back(tmp_path: Path) -> None:
    timing = dataclasses.replace(QUICK, refresh_s=0.05)

    async def test() -> None:
        first = HttpServer([definition("a")])
        async with first.running():
            path = mcp_json(tmp_path, {"web": {"url": first.url}})
            sources = following([path], timing=timing)
            seen = await sources.__aenter__()
            await seen.until_ids("web/a")
        await seen.until_presence("web", "stale")
        second = HttpServer([definition("a"), definition("b")])
        async with second.running():
            mcp_json(tmp_path, {"web": {"url": second.url}})
            await seen.until_ids("web/a", "web/b")
            await sources.__aexit__(None, None, None)

    asyncio.run(test())
