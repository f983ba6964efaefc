"""`certs init | renew | show | client NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ConfigError
from mcp_discovery.certificates import Pki, describe, ensure, issue_client
from mcp_discovery.commands.common import settings

ANY_ADDRESS = ("", "0.0.0.0", "::")


def run(arguments: argparse.Namespace) -> int:
    pki = Pki(arguments.dir)
    if arguments.action == "show":
        _show(pki)
    elif arguments.action == "client":
        _report([issue_client(pki, arguments.name)])
    else:
        host = settings(arguments).server.host
        hosts = [*arguments.names, *([] if host in ANY_ADDRESS else [host])]
        _report(ensure(pki, hosts, renew=arguments.action == "renew"))
    return 0


def _report(written: Iterable[Path]) -> None:
    for path in written:
        print(f"wrote {path}")


def _show(pki: Pki) -> None:
    if not pki.ca.is_file():
        raise ConfigError(f"there are no certificates in {pki.folder}: run `mcp-discovery certs init`")
    for path in (pki.ca, pki.server, *sorted(pki.folder.glob("clients/*.pem"))):
        shown = describe(path)
        print(shown.path)
        print(f"  subject  {shown.subject}")
        if shown.names:
            print(f"  names    {', '.join(shown.names)}")
        ended = "  EXPIRED: run `mcp-discovery certs init`" if shown.expired else ""
        print(f"  valid    {shown.not_before:%Y-%m-%d} to {shown.not_after:%Y-%m-%d}{ended}")
        print(f"  sha256   {shown.sha256}")
