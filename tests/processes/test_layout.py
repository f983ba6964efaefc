"""Which processes there are, for a number of front-ends."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mcp_discovery.config import Config, ServerTable
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.layout import layout


def config(frontends: int) -> Config:
    return Config(server=ServerTable(frontends=frontends))


@pytest.mark.parametrize("frontends", [1, 2, 5])
def test_one_process_or_an_engine_and_its_front_ends(frontends: int) -> None:
    with socket.socket() as tls, socket.socket() as admin:
        made = layout(config(frontends), {"tls": tls, "admin": admin}, Path("folder/engine"))
        expected = ["server"] if frontends == 1 else ["engine", *["frontend"] * frontends]
        assert [each.role for each in made] == expected
        assert len({each.name for each in made}) == len(made)
        assert sum(each.warms for each in made if each.role != "engine") == 1
        for each in made:
            assert each.sockets == ({} if each.role == "engine" else {"tls": tls.fileno()})
            assert each.engine_socket == (None if frontends == 1 else Path("folder/engine"))


def test_an_assignment_crosses_as_one_line_of_json() -> None:
    with socket.socket() as tls:
        for each in layout(config(2), {"tls": tls}, Path("folder/engine"), debug=True):
            line = each.model_dump_json()
            assert "\n" not in line
            assert Assignment.model_validate_json(line) == each
