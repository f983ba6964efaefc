"""Settings of the server: `mcp-discovery.toml`, then environment, then flags; frozen and validated.

Every key of every table is also an environment variable, `MCP_DISCOVERY__TABLE__KEY`. A later source
overrides an earlier one key by key. An unknown key or a value out of range is refused by name, and
the message says which source it came from.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from engine.config import ComputeDtype, Device, EngineConfig, KVDtype
from engine.errors import ConfigError

DEFAULT_FILE = Path("mcp-discovery.toml")
ENVIRONMENT_PREFIX = "MCP_DISCOVERY__"


def _listed(value: Any) -> Any:
    """A list from text: a JSON list, or items between commas (the form of an environment variable)."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError("must be a JSON list or items between commas") from error
    return [item.strip() for item in value.split(",") if item.strip()]


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerTable(_Table):
    """`[server]`: where to listen and what a connection may cost."""

    host: str = "127.0.0.1"
    port: Port = 8443
    """0 takes a free port."""
    uds: Path | None = None
    admin: str = "127.0.0.1:9464"
    """HOST:PORT of the admin listener, plain HTTP; empty switches it off."""
    frontends: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that answer callers; from 2 on the engine has a process of its own beside them."""
    allowed_hosts: Names = ()
    """Host headers accepted besides localhost and the certificate's names; `name:*` accepts any port."""
    allowed_origins: Names = ()
    """Origins of web pages that may call, such as `https://app.example.org`."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 256 << 10
    max_header_bytes: Annotated[int, Field(ge=1024, le=1 << 20)] = 32 << 10
    handshake_timeout_s: Seconds = 10.0
    header_timeout_s: Seconds = 5.0
    body_timeout_s: Seconds = 10.0
    keep_alive_s: Annotated[int, Field(ge=1, le=3600)] = 75
    backlog: Annotated[int, Field(ge=1, le=65_535)] = 4096


class TlsTable(_Table):
    """`[tls]`: the server's certificate and what it asks of clients."""

    cert: Path = Path("certs/server.pem")
    key: Path = Path("certs/server-key.pem")
    ca: Path = Path("certs/ca.pem")
    """The authority that clients trust, and whose client certificates are accepted."""
    client_certs: Literal["none", "optional", "required"] = "none"
    min_version: Literal["1.2", "1.3"] = "1.3"


class CatalogTable(_Table):
    """`[catalog]`: where tools come from; nothing means the demo catalogue."""

    paths: Paths = ()
    """Files or folders of tool lists, and `mcp.json` files that name live servers."""
    urls: Names = ()
    """Live servers by their Streamable HTTP URL."""
    refresh_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 60.0
    """Between two lists of a live server that does not tell of changes."""
    connect_timeout_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 120.0
    """For a live server to start and answer, the download by a package runner included."""


class EngineTable(_Table):
    """`[engine]`: the model and its memory. `None` leaves the choice to the engine."""

    model: str | None = None
    adapter: str = "auto"
    """`auto`: the shipped one of this model; `none`; or a file."""
    device: Device = "auto"
    allowance_mib: int = 2740
    serving_mib: int = 64
    """Of a CPU's allowance: what connections and calls take after the load, 100 KiB for each client."""
    dtype: ComputeDtype = "auto"
    kv_dtype: KVDtype = "auto"
    page_tokens: int = 16
    step_tokens: int | None = None
    max_pages: int | None = None
    threads: int | None = None


class DiscoveryTable(_Table):
    """`[discovery]`: how tools are found."""

    selector: Literal["score", "generate"] = "score"
    """`generate`: a chat model without an adapter writes the numbers of the tools that serve."""
    candidates: Annotated[int, Field(ge=1, le=256)] | None = None
    min_score: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    limit: Annotated[int, Field(ge=1, le=20)] = 5


class OverloadTable(_Table):
    """`[overload]`: how much may wait, and how long a stop may take."""

    max_queue: Annotated[int, Field(ge=0, le=1 << 24)] = 4096
    max_queued_tokens: Annotated[int, Field(ge=1, le=1 << 40)] = 4_000_000
    drain_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 30.0


class RecoveryTable(_Table):
    """`[recovery]`: how a process that failed is started again."""

    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """In a row; 0 never starts one again."""
    backoff_s: Annotated[float, Field(ge=0.0, le=600.0)] = 1.0
    """Before the first restart, twice as long before each one that follows."""
    healthy_s: Seconds = 300.0
    """A process that served this long has its earlier failures forgotten."""


class Config(_Table):
    """All settings. `load` is the way to make one."""

    server: ServerTable = ServerTable()
    tls: TlsTable = TlsTable()
    catalog: CatalogTable = CatalogTable()
    engine: EngineTable = EngineTable()
    discovery: DiscoveryTable = DiscoveryTable()
    overload: OverloadTable = OverloadTable()
    recovery: RecoveryTable = RecoveryTable()

    def catalogue_paths(self) -> tuple[Path, ...]:
        """The files and folders, or the demo catalogue where no source is set; raises `ConfigError` where
        one does not exist."""
        for path in self.catalog.paths:
            try:
                found = path.exists()
            except OSError as error:
                raise ConfigError(f"cannot look for the catalogue {path}: {error.strerror}") from None
            if not found:
                raise ConfigError(f"the catalogue {path} does not exist; set catalog.paths or --catalog")
        if self.catalog.paths or self.catalog.urls:
            return self.catalog.paths
        return (Path(__file__).parent / "data" / "demo",)

    def engine_config(self) -> EngineConfig:
        """The engine's own settings; raises `ConfigError` where a value is out of its range."""
        table = self.engine
        return EngineConfig(
            device=table.device,
            allowance_mib=table.allowance_mib,
            serving_mib=table.serving_mib,
            dtype=table.dtype,
            kv_dtype=table.kv_dtype,
            page_tokens=table.page_tokens,
            step_tokens=table.step_tokens,
            max_pages=table.max_pages,
            threads=table.threads,
            max_queue=self.overload.max_queue,
            max_queued_tokens=self.overload.max_queued_tokens,
        )


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """File, environment and flags as one `Config`.

    `file` None reads `mcp-discovery.toml` where it exists; `environment` None reads `os.environ`;
    `flags` is {table: {key: value}}, a value of None meaning not given. Raises `ConfigError`.
    """
    layers = [
        _from_file(file),
        _from_environment(os.environ if environment is None else environment),
        {
            table: {key: (value, "") for key, value in keys.items() if value is not None}
            for table, keys in (flags or {}).items()
        },
    ]
    values: dict[str, dict[str, Any]] = {}
    sources: dict[tuple[str, str], str] = {}
    for layer in layers:
        for table, keys in layer.items():
            for key, (value, source) in keys.items():
                values.setdefault(table, {})[key] = value
                sources[table, key] = source
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, sources)) from None
    config.engine_config()
    return config


_Layer = dict[str, dict[str, tuple[Any, str]]]


def _from_file(file: Path | None) -> _Layer:
    path = file or DEFAULT_FILE
    if file is None and not path.exists():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for table, keys in tables.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {table!r} stands outside a table; tables are {_table_names()}")
    return {
        table: {key: (value, f" ({path})") for key, value in keys.items()} for table, keys in tables.items()
    }


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for name, value in environment.items():
        if not name.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        table, separator, key = name[len(ENVIRONMENT_PREFIX) :].lower().partition("__")
        if not separator or not key:
            raise ConfigError(f"the environment variable {name} should read {ENVIRONMENT_PREFIX}TABLE__KEY")
        layer.setdefault(table, {})[key] = (value, f" (environment variable {name})")
    return layer


def _table_names() -> str:
    return ", ".join(f"[{name}]" for name in Config.model_fields)


def _sentence(error: ValidationError, sources: Mapping[tuple[str, str], str]) -> str:
    """The first problem of `error` as one sentence that names the key and its source."""
    problem = error.errors(include_url=False)[0]
    location = [str(part) for part in problem["loc"]]
    table = location[0]
    if table not in Config.model_fields:
        return f"there is no configuration table [{table}]; tables are {_table_names()}"
    if len(location) == 1:
        return f"[{table}] must be a table"
    key = location[1]
    source = sources.get((table, key), "")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(type(getattr(Config(), table)).model_fields)
        return f"there is no key {table}.{key}{source}; [{table}] knows {known}"
    reason = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ").removeprefix("should ")
    reason = reason if reason.startswith("must") else f"must {reason}"
    return f"{table}.{key} {reason}, it is {problem['input']!r}{source}"
