"""The command line `mcp-discovery`: what can be asked, and how a fault becomes one sentence and an exit code.

Exit codes: 0 ok, 1 unexpected, 2 usage or configuration, 3 load refused, 4 no match, 5 request refused,
70 the engine failed while serving.
Each command is a module of `mcp_discovery.commands` with `run(args) -> int`; it is imported only when
it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.errors import ConfigError, EngineError, LoadRefused, ModelError
from mcp_discovery import __version__
from mcp_discovery.exits import INTERRUPTED, LOAD_REFUSED, OK, UNEXPECTED, USAGE, CommandFailed


class _Parser(argparse.ArgumentParser):
    """Tells a usage error in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code = int(importlib.import_module(f"mcp_discovery.commands.{arguments.module}").run(arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has enough; Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # noqa: BLE001 - the last resort: a user gets a sentence, not a traceback
        if arguments.debug:
            traceback.print_exc()
        sentence, code = sentence_of(error)
        print(f"mcp-discovery: {sentence}", file=sys.stderr)
        return code


def sentence_of(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code of a fault."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # what crossed a task group comes wrapped
    match error:
        case LoadRefused():
            return str(error), LOAD_REFUSED
        case ConfigError() | ModelError():
            return str(error), USAGE
        case EngineError() | CommandFailed():
            return str(error), UNEXPECTED
    kind = type(error).__name__
    return f"unexpected {kind}: {error}; run it again with --debug for the traceback", UNEXPECTED


def _parser() -> _Parser:
    parser = _Parser(prog="mcp-discovery", description="Tells an agent which of its tools it needs now.")
    parser.add_argument("--version", action="version", version=f"mcp-discovery {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _serve(commands)
    _plan(commands)
    _call(commands)
    _catalog(commands)
    _certs(commands)
    _model(commands)
    _eval(commands)
    _train(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: _Commands[_Parser], name: str, text: str, module: str) -> _Parser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(module=module)
    command.add_argument("--config", type=Path, metavar="FILE", help="settings (mcp-discovery.toml)")
    command.add_argument("--debug", action="store_true", help="more log lines, and tracebacks")
    return command


def _group(commands: _Commands[_Parser], name: str, text: str) -> _Commands[_Parser]:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    return command.add_subparsers(required=True, metavar="COMMAND", dest="action")


def _engine_options(command: _Parser) -> None:
    command.add_argument("--model", metavar="MODEL", help="a GGUF file or a safetensors folder")
    command.add_argument("--adapter", metavar="ADAPTER", help="auto (the shipped one), none, or a file")
    command.add_argument(
        "--allowance-mib", type=int, metavar="N", help="memory for everything, in MiB (2740)"
    )
    command.add_argument("--device", choices=("auto", "cuda", "cpu"), help="where to run (auto)")


def _catalogue_option(command: _Parser) -> None:
    text = "a file or folder of tool lists, an mcp.json, or a server's URL; may be given again"
    command.add_argument("--catalog", action="append", metavar="SOURCE", help=text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, it is {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 3600, it is {text}")
    return number


def _serve(commands: _Commands[_Parser]) -> None:
    command = _command(commands, "serve", "serve discover_tools over TLS", "serve")
    command.add_argument("--host", help="address to listen on (127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (8443); 0 takes a free one")
    command.add_argument("--uds", type=Path, metavar="PATH", help="also listen on a Unix socket")
    command.add_argument("--admin", metavar="HOST:PORT", help="admin listener (127.0.0.1:9464); '' for none")
    command.add_argument("--frontends", type=int, metavar="N", help="processes that terminate TLS (1)")
    _catalogue_option(command)
    _engine_options(command)


def _plan(commands: _Commands[_Parser]) -> None:
    command = _command(commands, "plan", "print the memory plan; allocate nothing", "plan")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.add_argument(
        "--measure",
        action="store_true",
        help="measure context and modules of the card anew, in a child process",
    )
    _engine_options(command)


def _call(commands: _Commands[_Parser]) -> None:
    command = _command(commands, "call", "call discover_tools of a running server", "call")
    command.add_argument("query", nargs="?", help="the task, in any language")
    command.add_argument("--url", help="the server's address (https://127.0.0.1:8443/mcp)")
    command.add_argument("--ca", type=Path, metavar="FILE", help="the authority to trust (certs/ca.pem)")
    command.add_argument("--cert", type=Path, metavar="FILE", help="a client certificate")
    command.add_argument("--key", type=Path, metavar="FILE", help="its key, where it is in another file")
    command.add_argument("--token", help="a bearer token")
    command.add_argument("--limit", type=int, help="most tools to return, 1 to 20")
    command.add_argument("--detail", choices=("full", "compact", "names"), help="how much of each tool")
    command.add_argument(
        "--server", action="append", dest="servers", help="only of this server; may be given again"
    )
    command.add_argument("--exclude", action="append", metavar="TOOL", help="leave out; may be given again")
    command.add_argument("--name", action="append", dest="names", metavar="TOOL", help="exactly this tool")
    command.add_argument("--read-only", action="store_true", help="only tools that change nothing")
    command.add_argument("--max-response-tokens", type=int, metavar="N", help="cut definitions to fit")
    command.add_argument("--min-score", type=float, metavar="P", help="offer no tool below this probability")
    command.add_argument("--explain", action="store_true", help="a reason with each tool")
    # A person at a terminal waits longer than an agent: a cold call on a slow machine shall still answer.
    command.add_argument(
        "--timeout-ms", type=int, metavar="N", default=30_000, help="end to end, 1 to 60,000 (30,000)"
    )
    command.add_argument("--json", action="store_true", help="the whole result as JSON")


def _catalog(commands: _Commands[_Parser]) -> None:
    group = _group(commands, "catalog", "look at tool lists and live servers")
    for name, text, least in (
        ("add", "ask sources for their tools, then add them to the settings", "+"),
        ("list", "list the tools of a catalogue", "*"),
        ("check", "report what is wrong in tool lists and with live servers", "*"),
    ):
        command = _command(group, name, text, "catalog")
        what = "files or folders of tool lists, mcp.json files, URLs of servers"
        command.add_argument("catalog", nargs=least, metavar="SOURCE", help=what)
        command.add_argument("--json", action="store_true", help="as JSON")
        command.add_argument("--offline", action="store_true", help="ask no live server")
        command.add_argument(
            "--wait-s", type=_seconds, default=60.0, metavar="S", help="for live servers to answer (60)"
        )


def _certs(commands: _Commands[_Parser]) -> None:
    group = _group(commands, "certs", "make and show certificates")
    for name, text in (
        ("init", "make an authority and a server certificate, or renew what needs it"),
        ("renew", "make the server's certificate anew"),
        ("show", "show what the certificates say"),
        ("client", "issue a client certificate"),
    ):
        command = _command(group, name, text, "certs")
        command.add_argument(
            "--dir", type=Path, metavar="DIR", default=Path("certs"), help="the folder (certs)"
        )
        if name in ("init", "renew"):
            command.add_argument(
                "--host", action="append", default=[], dest="names", help="a name clients call it by"
            )
        if name == "client":
            command.add_argument("name", metavar="NAME", help="who it is for")


def _model(commands: _Commands[_Parser]) -> None:
    group = _group(commands, "model", "fetch, show and verify model files")
    _command(group, "fetch", "fetch the embedded default model", "model")
    for name, text in (
        ("show", "show what a model is"),
        ("verify", "check a model's files"),
        ("build-kernels", "build what serving a model on this card would compile"),
    ):
        command = _command(group, name, text, "model")
        command.add_argument("model", nargs="?", metavar="MODEL", help="a GGUF file or a safetensors folder")
        command.add_argument("--json", action="store_true", help="as JSON")


def _eval(commands: _Commands[_Parser]) -> None:
    command = _command(
        commands, "eval", "measure retrieval quality on a labelled set, beside BM25", "evaluate"
    )
    command.add_argument("set", type=Path, metavar="DIR", help="holds catalogue.jsonl and queries.jsonl")
    command.add_argument("--limit", type=_positive, metavar="N", help="at most N queries")
    command.add_argument("--json", action="store_true", help="as JSON")
    _engine_options(command)


def _train(commands: _Commands[_Parser]) -> None:
    command = _command(commands, "train", "fine-tune the discovery adapter on labelled sets", "train")
    command.add_argument(
        "sets", type=Path, nargs="+", metavar="DIR", help="holds catalogue.jsonl and queries.jsonl, or such"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("adapter.safetensors"), help="(adapter.safetensors)"
    )
    command.add_argument("--model", metavar="MODEL", help="the base: a GGUF file or a safetensors folder")
    command.add_argument(
        "--adapter", metavar="ADAPTER", help="to go on from: auto (the shipped one), none, or a file"
    )
    command.add_argument("--device", choices=("auto", "cuda", "cpu"), help="where to train (auto)")
    command.add_argument("--steps", type=_positive, metavar="N", default=300, help="of training (300)")
    command.add_argument("--seed", type=int, metavar="N", default=0, help="fixes the run (0)")
    command.add_argument(
        "--hold-out",
        type=float,
        metavar="SHARE",
        default=0.15,
        help="of each set, to choose the best snapshot by (0.15); 0 for none",
    )
    command.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="NAME=VALUE", help="any other option"
    )
