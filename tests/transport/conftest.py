"""One server for the tests of this room that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcp_discovery.certificates import Pki
from tests.transport.serving import Served, serving


@pytest.fixture(scope="session")
def served(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(pki, tmp_path_factory.mktemp("uds") / "mcp.sock", not_ready=lambda: "") as running:
        yield running


@pytest.fixture
def fresh(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one's own: its events and counts start at nothing."""
    with serving(pki, tmp_path_factory.mktemp("uds") / "mcp.sock") as running:
        yield running
