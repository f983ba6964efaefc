"""`eval DIR`: retrieval quality through the same path as `discover_tools`, beside BM25."""

from __future__ import annotations

import argparse
import asyncio
import json

from engine.engine import Engine
from engine.local import LocalClient
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.commands.common import Progress, settings
from mcp_discovery.config import Config
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.evaluate import LabelledSet, Report, evaluate
from mcp_discovery.service import choices


def run(arguments: argparse.Namespace) -> int:
    config = settings(arguments)
    LabelledSet.load(arguments.set, 1)  # a wrong folder is told before the model is loaded
    report = asyncio.run(_evaluate(arguments, config))
    print(json.dumps(report.as_json(), indent=2) if arguments.json else report.as_text())
    return 0


async def _evaluate(arguments: argparse.Namespace, config: Config) -> Report:
    model = DiscoveryModel.of(config.engine.model, config.engine.adapter)
    engine = await asyncio.to_thread(Engine.create, config.engine_config(), model.path, model.adapter_path)
    try:
        client = LocalClient(engine)
        table = config.engine

        def discovery_of(catalogue: Catalogue) -> Discovery:
            return model.discovery(
                client, catalogue, choices(config), device=table.device, page_tokens=table.page_tokens
            )

        progress = Progress(f"ranking {arguments.set.name}", "queries")
        warming = Progress(f"reading {arguments.set.name}", "tools")
        return await evaluate(arguments.set, discovery_of, arguments.limit, progress, warming)
    finally:
        await asyncio.to_thread(engine.close)
