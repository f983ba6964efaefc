"""Fixtures of every room."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcp_discovery.certificates import Pki, ensure


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """A development authority and a server certificate for this machine."""
    pki = Pki(Path(tmp_path_factory.mktemp("certs")))
    ensure(pki)
    return pki
