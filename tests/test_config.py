"""Three sources of settings, one validation; what is wrong is named with its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from mcp_discovery.config import load


def written(folder: Path, text: str) -> Path:
    path = folder / "mcp-discovery.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_are_the_documented_ones() -> None:
    config = load(environment={})
    assert (config.server.port, config.server.admin) == (8443, "127.0.0.1:9464")
    assert (config.tls.client_certs, config.tls.min_version) == ("none", "1.3")
    assert (config.engine.allowance_mib, config.engine.page_tokens) == (2740, 16)
    assert config.discovery.limit == 5


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\nport = 1\nhost = "a"\nmax_body_bytes = 2048\n')
    environment = {"MCP_DISCOVERY__SERVER__PORT": "2", "MCP_DISCOVERY__SERVER__HOST": "b", "PATH": "x"}
    config = load(file, environment, {"server": {"port": 3, "host": None}})
    assert (config.server.port, config.server.host, config.server.max_body_bytes) == (3, "b", 2048)


def test_the_file_in_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "[overload]\nmax_queue = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load(environment={}).engine_config().max_queue == 7


@pytest.mark.parametrize(
    ("text", "items"), [("a, b:*", ("a", "b:*")), ('["a", "b:*"]', ("a", "b:*")), ("", ())]
)
def test_a_list_in_the_environment_is_json_or_items_between_commas(text: str, items: tuple[str, ...]) -> None:
    assert load(environment={"MCP_DISCOVERY__SERVER__ALLOWED_HOSTS": text}).server.allowed_hosts == items


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[server]\nprot = 1", r"no key server\.prot \(.*mcp-discovery\.toml\); \[server\] knows host, port"),
        ("[sever]\nport = 1", r"no configuration table \[sever\]; tables are \[server\]"),
        ("port = 1", "'port' stands outside a table"),
        (
            "[server]\nport = 70000",
            r"server\.port must be less than or equal to 65535, it is 70000 \(.*toml\)",
        ),
        ('[server]\nport = "x"', r"server\.port must be a valid integer"),
        ('[engine]\ndevice = "tpu"', r"engine\.device must be 'auto', 'cuda' or 'cpu', it is 'tpu'"),
        ("[engine]\npage_tokens = 0", r"engine\.page_tokens must be from 1 to 256, it is 0"),
        ("[engine]\nthreads = 0", r"engine\.threads must be from 1 to 1024, it is 0"),
        ("[engine]\nthreads = 100000", r"engine\.threads must be from 1 to 1024, it is 100000"),
        ("[engine]\nallowance_mib = 0", r"engine\.allowance_mib must be from 1"),
        ('[tls]\nmin_version = "1.1"', r"tls\.min_version must be '1\.2' or '1\.3'"),
        ("[overload]\nmax_queue = -1", r"overload\.max_queue must be greater than or equal to 0, it is -1"),
        ("[overload]\nmax_queued_tokens = 0", r"overload\.max_queued_tokens must be greater than"),
        ("[discovery]\nmin_score = 2", r"discovery\.min_score must be less than or equal to 1"),
        ("[server\nport = 1", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, toml: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as raised:
        load(written(tmp_path, toml), {})
    assert "\n" not in str(raised.value)


def test_what_is_wrong_in_the_environment_is_named() -> None:
    for name, expected in {
        "MCP_DISCOVERY__SERVER__PROT": r"no key server\.prot \(environment variable MCP_DIS",
        "MCP_DISCOVERY__PORT": "should read MCP_DISCOVERY__TABLE__KEY",
        "MCP_DISCOVERY__SERVER__PORT": r"server\.port .* it is 'nope' \(environment variable",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            load(environment={name: "nope"})


def test_a_missing_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load(tmp_path / "none.toml", {})


def test_a_catalogue_that_cannot_be_looked_for_is_named() -> None:
    config = load(environment={"MCP_DISCOVERY__CATALOG__PATHS": "x" * 300})
    with pytest.raises(ConfigError, match=r"cannot look for the catalogue x+: File name too long"):
        config.catalogue_paths()


def test_live_servers_alone_are_a_catalogue() -> None:
    config = load(environment={"MCP_DISCOVERY__CATALOG__URLS": "https://example.org/mcp"})
    assert config.catalog.urls == ("https://example.org/mcp",)
    assert config.catalogue_paths() == ()
    assert load(environment={}).catalogue_paths()
