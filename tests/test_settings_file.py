"""Adding sources to a settings file that a person wrote."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from mcp_discovery.settings_file import with_catalogue

BEFORE = """# mine
[server]
port = 9000  # as agreed

[catalog]  # ours
refresh_s = 30.0
paths = [
  "tools.jsonl",  # the old ones [sic]
]

[engine]
device = "cpu"
"""


def test_what_else_stands_there_stays() -> None:
    text = with_catalogue(BEFORE, ["mcp.json", "tools.jsonl"], ["https://example.org/mcp"])
    assert tomllib.loads(text) == {
        "server": {"port": 9000},
        "catalog": {
            "refresh_s": 30.0,
            "paths": ["tools.jsonl", "mcp.json"],
            "urls": ["https://example.org/mcp"],
        },
        "engine": {"device": "cpu"},
    }
    assert text.startswith("# mine\n[server]\nport = 9000  # as agreed\n\n[catalog]  # ours\n")
    assert text.endswith('[engine]\ndevice = "cpu"\n')
    assert with_catalogue(text, ["mcp.json"], ["https://example.org/mcp"]) == text


@pytest.mark.parametrize("text", ["", '[engine]\ndevice = "cpu"', "# nothing\n\n"])
def test_the_table_is_made_where_there_is_none(text: str) -> None:
    assert tomllib.loads(with_catalogue(text, ["a.json"], []))["catalog"] == {"paths": ["a.json"]}


@pytest.mark.parametrize(
    "text",
    ['catalog.paths = ["x"]', 'catalog = {paths = ["x"]}', '[catalog]\npaths = "x"', "[catalog"],
)
def test_a_form_that_cannot_be_added_to_is_left_to_its_writer(text: str) -> None:
    with pytest.raises(ConfigError):
        with_catalogue(text, ["a.json"], [])


PATHS = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), max_size=4)


@given(PATHS, PATHS, PATHS)
def test_what_is_added_is_read_back(first: list[str], second: list[str], urls: list[str]) -> None:
    text = with_catalogue(with_catalogue(BEFORE, first, urls), second, [])
    read = tomllib.loads(text)["catalog"]
    assert set(read["paths"]) == {"tools.jsonl", *first, *second}
    assert set(read.get("urls", [])) == set(urls)
