"""`certs init | renew | show | client NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from mcp_discovery.certificates import Pki, describe, ensure, issue_client


def run(arguments: argparse.Namespace) -> int:
    pki = Pki(arguments.dir)
    if arguments.action == "show":
        _show(pki)
    elif arguments.action == "client":
        _report([issue_client(pki, arguments.name)])
    else:
        _report(ensure(pki, arguments.host, renew=arguments.action == "renew"))
    return 0


def _report(written: Iterable[Path]) -> None:
    for path in written:
        print(f"wrote {path}")


def _show(pki: Pki) -> None:
    for path in (pki.ca, pki.server, *sorted(pki.folder.glob("clients/*.pem"))):
        shown = describe(path)
        print(shown.path)
        print(f"  subject  {shown.subject}")
        if shown.names:
            print(f"  names    {', '.join(shown.names)}")
        ended = "  EXPIRED: run `mcp-discovery certs init`" if shown.expired else ""
        print(f"  valid    {shown.not_before:%Y-%m-%d} to {shown.not_after:%Y-%m-%d}{ended}")
        print(f"  sha256   {shown.sha256}")
