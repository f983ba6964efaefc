"""Live MCP servers as an `mcp.json` names them: how each is reached, and what of that is secret.

Forms, as desktop clients and editors write them: `mcpServers` (or `servers`) by name, each with
`command`, `args`, `env`, `cwd` (stdio) or with `url`, `headers` (Streamable HTTP). Any of these texts
may take `${VAR}`, `${env:VAR}` or `${VAR:-default}` from this process's environment.

What comes from the environment, every value of `env` and `headers`, and the user and query of a URL
are secrets: `Spec.redact` takes them out of any text that is logged, shown or stored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from mcp_discovery.discovery.catalogue import Problem, canonical

SHORTEST_SECRET = 4  # characters; what is shorter is found in any text
HIDDEN = "***"
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_UNKNOWN_FORM = re.compile(r"\$\{[^}]*\}")
_HTTP = ("http", "streamable-http", "streamableHttp", "streamable_http")


@dataclass(frozen=True, slots=True)
class Stdio:
    """A server that is a child process."""

    command: str
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Http:
    """A server that is reached by Streamable HTTP."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Spec:
    """One live server. `identity` names what it is without holding any secret."""

    name: str
    entry: str  # where it is configured
    endpoint: Stdio | Http = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False, compare=False)  # longest first
    identity: str

    def redact(self, text: str) -> str:
        """`text` without this server's secrets."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A server that is configured and cannot be started as it stands."""

    name: str
    problem: Problem


def of_url(url: str, environment: Mapping[str, str]) -> Spec | Unreachable:
    """The one server at `url`, named by its host."""
    try:
        parts = urlsplit(url)
        name = parts.netloc.rpartition("@")[2] or "server"
    except ValueError:
        name = "server"
    return parse(name, {"url": url}, "catalog.urls", environment)


def parse_all(
    servers: Mapping[str, Any], source: str, environment: Mapping[str, str]
) -> Iterator[Spec | Unreachable]:
    """Every entry that is not switched off (`"disabled": true`)."""
    for name, entry in servers.items():
        if not (isinstance(entry, dict) and entry.get("disabled") is True):
            yield parse(name, entry, f"{source} {name!r:.80}", environment)


def parse(name: str, entry: object, where: str, environment: Mapping[str, str]) -> Spec | Unreachable:
    """One entry of an `mcp.json`."""
    try:
        if not name.strip():
            raise ValueError("a server needs a name that is not empty")
        if not isinstance(entry, dict):
            raise ValueError("a server must be an object")
        expand = _Expansion(environment)
        endpoint = _http(entry, expand) if "command" not in entry else _stdio(entry, expand)
    except ValueError as error:
        return Unreachable(name, Problem(where, f"{error}."))
    secrets = sorted(set(_secrets(endpoint, expand.values)), key=lambda secret: (-len(secret), secret))
    return Spec(name, where, endpoint, tuple(secrets), _identity(name, entry))


class _Expansion:
    """Puts the environment's values into texts, and remembers them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.values: list[str] = []

    def text(self, value: object, what: str) -> str:
        """Raises ValueError for what is no text and for a variable that is not set."""
        if not isinstance(value, str):
            raise ValueError(f"{what} must be text")
        expanded = _VARIABLE.sub(self._value, value)
        if "\x00" in expanded:
            raise ValueError(f"{what} holds a NUL character")
        if (unknown := _UNKNOWN_FORM.search(_VARIABLE.sub("", value))) is not None:
            raise ValueError(f"{what} asks for {unknown[0]!r:.60}; only ${{VARIABLE}} is filled in")
        return expanded

    def texts(self, value: object, what: str) -> dict[str, str]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"{what} must be an object of texts")
        # Clients write numbers and booleans here too; a process only takes text.
        plain = {key: str(item) if isinstance(item, int | float) else item for key, item in value.items()}
        return {key: self.text(item, f"{what} {key!r:.60}") for key, item in plain.items()}

    def _value(self, match: re.Match[str]) -> str:
        value = self._environment.get(match[1], match[2])
        if value is None:
            raise ValueError(f"the environment variable {match[1]} is not set")
        self.values.append(value)
        return value


def _stdio(entry: Mapping[str, Any], expand: _Expansion) -> Stdio:
    args = entry.get("args") or []
    if not isinstance(args, list):
        raise ValueError('"args" must be a list of texts')
    command = expand.text(entry["command"], '"command"')
    if not command.strip():
        raise ValueError('"command" must not be empty')
    cwd = entry.get("cwd")
    return Stdio(
        command,
        tuple(expand.text(item, '"args"') for item in args),
        expand.texts(entry.get("env"), '"env"'),
        None if cwd is None else expand.text(cwd, '"cwd"'),
    )


def _http(entry: Mapping[str, Any], expand: _Expansion) -> Http:
    url = entry.get("url", entry.get("serverUrl"))
    if url is None:
        raise ValueError('a server needs a "command" or a "url"')
    kind = entry.get("type", entry.get("transport", "http"))
    if kind not in _HTTP:
        raise ValueError(f"its transport {kind!r:.40} is not supported; give its Streamable HTTP URL")
    address = expand.text(url, '"url"')
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError('"url" must begin with http:// or https:// and name a host')
    headers = expand.texts(entry.get("headers"), '"headers"')
    for key, value in headers.items():
        if not (key + value).isprintable() or not key.isascii() or not value.isascii():
            raise ValueError(f'"headers" {key!r:.60} must be printable ASCII')
    return Http(address, headers)


def _secrets(endpoint: Stdio | Http, expanded: list[str]) -> Iterator[str]:
    given = list(expanded)
    if isinstance(endpoint, Stdio):
        given += endpoint.env.values()
    else:
        given += endpoint.headers.values()
        parts = urlsplit(endpoint.url)
        given += [parts.netloc.rpartition("@")[0], parts.username or "", parts.password or "", parts.query]
    for value in given:
        # An `Authorization` header is a scheme and a secret; either may be told alone, or percent-encoded.
        for part in (value, *value.split()):
            yield from (form for form in {part, quote(part, safe="")} if len(form) >= SHORTEST_SECRET)


def _identity(name: str, entry: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 of how the server is reached, as configured, before any variable is filled in."""
    kept = {key: entry[key] for key in ("command", "args", "cwd", "url", "serverUrl") if key in entry}
    return hashlib.sha256(canonical([name, kept])).hexdigest()
