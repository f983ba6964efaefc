"""`eval DIR`: retrieval quality through the same path as `discover_tools`, beside BM25."""

from __future__ import annotations

import argparse
import asyncio
import json

from engine.engine import Engine
from engine.local import LocalClient
from mcp_discovery import model_store
from mcp_discovery.commands.common import Progress, settings
from mcp_discovery.config import Config
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.evaluate import LabelledSet, Report, evaluate
from mcp_discovery.service import adapter_path, build_discovery


def run(arguments: argparse.Namespace) -> int:
    config = settings(arguments)
    LabelledSet.load(arguments.set, 1)  # a wrong folder is told before the model is loaded
    report = asyncio.run(_evaluate(arguments, config))
    print(json.dumps(report.as_json(), indent=2) if arguments.json else report.as_text())
    return 0


async def _evaluate(arguments: argparse.Namespace, config: Config) -> Report:
    model_path = model_store.locate(config.engine.model)
    engine = await asyncio.to_thread(Engine.create, config.engine_config(), model_path, adapter_path(config))
    try:
        client = LocalClient(engine)

        def discovery_of(catalogue: Catalogue) -> Discovery:
            return build_discovery(config, client, model_path, catalogue)

        progress = Progress(f"ranking {arguments.set.name}", "queries")
        return await evaluate(arguments.set, discovery_of, arguments.limit, progress)
    finally:
        await asyncio.to_thread(engine.close)
