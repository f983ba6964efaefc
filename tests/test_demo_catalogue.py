"""The committed demo catalogue, the script that makes it, and the queries made from it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for

from benchmarks import demo_catalogue
from benchmarks.demo_catalogue import DEMO, MCP_JSON, PERMISSIVE, SERVERS, PublishedServer, ServerFailed
from benchmarks.queries import (
    MAX_WORDS,
    MIN_WORDS,
    QUERIES,
    as_lines,
    generate,
    load_queries,
    load_tools,
    name_words,
    task_of,
)

FILES = sorted(DEMO.glob("*.jsonl"))
TOOLS = load_tools()
PRIVATE = re.compile(r"/(?:root|home|tmp|work|Users)/|ghp_\w{8}|xox[bp]-\w|AKIA[0-9A-Z]{8}|sk_(?:live|test)_")


def sources() -> dict[str, list[str]]:
    """The rows of SOURCES.md by server name."""
    lines = (DEMO / "SOURCES.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
    return {row[0]: row for row in rows[2:]}


# --- the catalogue -----------------------------------------------------------------------------------


def test_the_catalogue_is_large_and_varied_enough() -> None:
    assert len(TOOLS) >= 120
    assert len(FILES) >= 8
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 1_500_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_holds_one_servers_tools(path: Path) -> None:
    tools = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = [tool["name"] for tool in tools]
    assert all(next(iter(tool)) == "server" and tool["server"] == path.stem for tool in tools)
    assert len(set(names)) == len(names) > 0
    assert all(tool["description"].strip() for tool in tools)
    for tool in tools:
        for schema in (tool["inputSchema"], tool.get("outputSchema", {"type": "object"})):
            assert schema["type"] == "object"
            validator_for(schema).check_schema(schema)


@pytest.mark.parametrize("path", [*FILES, MCP_JSON, DEMO / "SOURCES.md", QUERIES], ids=lambda path: path.name)
def test_no_local_path_and_no_secret_is_in_the_data(path: Path) -> None:
    assert not PRIVATE.search(path.read_text(encoding="utf-8"))


def test_each_file_has_a_source_with_a_permissive_licence_and_its_text() -> None:
    rows = sources()
    assert sorted(rows) == [path.stem for path in FILES]
    for server, (_, _, version, registry, licence, texts, count, _) in rows.items():
        assert re.fullmatch(r"\d+(\.\d+)+", version)
        assert registry in {"npm", "PyPI"}
        assert licence in PERMISSIVE
        assert int(count) == sum(tool["server"] == server for tool in TOOLS)
        linked = re.findall(r"\]\((.+?)\)", texts)
        assert linked
        assert all((DEMO / link).stat().st_size > 500 or "NOTICE" in link for link in linked)


def test_the_table_of_servers_is_what_the_files_say() -> None:
    by_name = sorted(SERVERS, key=lambda server: server.name)
    assert list(SERVERS) == by_name
    assert (DEMO / "SOURCES.md").read_text(encoding="utf-8") == demo_catalogue.sources_table(SERVERS, DEMO)
    assert MCP_JSON.read_text(encoding="utf-8") == demo_catalogue.client_config(SERVERS)


def test_the_client_configuration_pins_every_version() -> None:
    entries = json.loads(MCP_JSON.read_text(encoding="utf-8"))["mcpServers"]
    assert sum(entry["command"] == "npx" for entry in entries.values()) >= 10
    for server in SERVERS:
        entry = entries[server.name]
        assert entry["command"] in {"npx", "uvx"}
        assert any(word.endswith(server.version) for word in entry["args"])


# --- the script --------------------------------------------------------------------------------------

# A server of two pages whose tools have unusual key order, an unknown field and text beyond ASCII.
PAGED_SERVER = """#!{python}
import json, sys
PAGES = {{None: ("two", [{first}]), "two": (None, [{second}])}}
print("starting", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "initialize":
        result = {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}},
                  "serverInfo": {{"name": "paged", "version": "1"}}}}
    else:
        cursor, tools = PAGES[(message.get("params") or {{}}).get("cursor")]
        result = {{"tools": tools, **({{"nextCursor": cursor}} if cursor else {{}})}}
    print(json.dumps({{"jsonrpc": "2.0", "id": message["id"], "result": result}}), flush=True)
"""
FIRST: dict[str, Any] = {
    "inputSchema": {"properties": {"b": {"x-unit": "m"}, "a": {}}, "type": "object"},
    "name": "measure",
    "x-vendor": {"z": 1, "y": None},
    "description": "Mesure une pièce",
}
SECOND: dict[str, Any] = {"name": "second", "inputSchema": {"type": "object"}}


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def paged(tmp_path: Path) -> Path:
    text = PAGED_SERVER.format(python=sys.executable, first=repr(FIRST), second=repr(SECOND))
    return program(tmp_path, "paged", text)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return program(tmp_path, "broken", f"#!{sys.executable}\nraise SystemExit(3)\n")


def published(name: str) -> PublishedServer:
    return PublishedServer(name, "npm", name, "1.0.0", "MIT", name)


def test_every_page_is_read_and_definitions_stay_as_served(paged: Path, tmp_path: Path) -> None:
    tools = demo_catalogue.run_server(published("paged"), paged, tmp_path / "home")
    assert [json.dumps(tool) for tool in tools] == [json.dumps(FIRST), json.dumps(SECOND)]
    lines = demo_catalogue.tool_lines("paged", tools, private=[str(tmp_path)]).splitlines()
    assert lines[0] == json.dumps({"server": "paged", **FIRST}, ensure_ascii=False)
    assert "pièce" in lines[0]


def test_a_definition_that_shows_a_local_path_is_refused() -> None:
    with pytest.raises(ServerFailed, match="local path"):
        demo_catalogue.tool_lines("files", [{"name": "read", "description": "In /srv/me/x"}], ["/srv/me"])


def test_a_server_that_dies_is_told_in_one_line(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed) as failure:
        demo_catalogue.run_server(published("broken"), broken, tmp_path / "home")
    assert "\n" not in str(failure.value)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_catalogue, "LIST_TIMEOUT_S", 0.2)
    # It ends by itself after 5 s, so that a lost time-out shows as another message and not as a hang.
    text = f"#!{sys.executable}\nimport threading\nthreading.Event().wait(5)\n"
    silent = program(tmp_path, "silent", text)
    with pytest.raises(ServerFailed, match="did not list its tools"):
        demo_catalogue.run_server(published("silent"), silent, tmp_path / "home")


def test_one_failing_server_is_named_and_the_rest_are_written(
    paged: Path,
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs = {"broken": broken, "paged": paged}
    monkeypatch.setattr(demo_catalogue, "SERVERS", tuple(published(name) for name in programs))
    monkeypatch.setattr(demo_catalogue, "install", lambda server, folder: programs[server.name])
    package = tmp_path / "work" / "paged" / "node_modules" / "paged"
    package.mkdir(parents=True)
    (package / "LICENSE").write_text("MIT", encoding="utf-8")
    out = tmp_path / "out"
    assert demo_catalogue.main(["--out", str(out), "--work", str(tmp_path / "work")]) == 1
    assert capsys.readouterr().err.startswith("broken failed: ")
    assert len((out / "paged.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (out / "LICENSES" / "paged-LICENSE").exists()
    assert "| paged |" in (out / "SOURCES.md").read_text(encoding="utf-8")
    assert not (out / "broken.jsonl").exists()


def test_a_package_without_a_licence_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no licence text"):
        demo_catalogue.write_licences(published("bare"), tmp_path, tmp_path)


# --- the queries -------------------------------------------------------------------------------------


def test_the_committed_queries_are_what_the_generator_makes() -> None:
    assert QUERIES.read_text(encoding="utf-8") == as_lines(generate(TOOLS))


def test_queries_are_many_unique_bounded_and_about_known_tools() -> None:
    queries = load_queries()
    ids = {f"{tool['server']}/{tool['name']}" for tool in TOOLS}
    assert len({query.query.casefold() for query in queries}) == len(queries) >= 4_096
    assert len({query.id for query in queries}) == len(queries)
    assert {query.about for query in queries} == ids
    lengths = [len(query.query.split()) for query in queries]
    assert min(lengths) == MIN_WORDS
    assert max(lengths) <= MAX_WORDS
    assert not any(re.search(r"[{}\n`]|<\|", query.query) for query in queries)


def test_another_seed_makes_other_queries_and_a_new_tool_leaves_the_old_ones_alone() -> None:
    some = TOOLS[:20]
    texts = {query.query for query in generate(some, per_tool=4)}
    assert texts != {query.query for query in generate(some, per_tool=4, seed=2)}
    assert texts <= {query.query for query in generate([*some, TOOLS[-1]], per_tool=4)}


def test_more_queries_than_a_tool_can_give_are_refused() -> None:
    with pytest.raises(ValueError, match="different queries"):
        generate(TOOLS[:1], per_tool=10_000)


@pytest.mark.parametrize(
    ("name", "description", "task"),
    [
        ("git_show", "Shows the working tree", ("show", "the working tree")),
        ("API-get-user", "Notion | Retrieve a user\nError Responses", ("retrieve", "a user")),
        ("fetch", "Fetches a URL (or a file (local)) quickly. Slow.", ("fetch", "a URL quickly")),
        ("list_commits", "Get list of commits\nof a branch", ("get", "list of commits of a branch")),
        ("create_page", "", ("create", "page")),
        ("think", "A detailed tool", ("use", "the think tool")),
    ],
)
def test_the_task_comes_from_the_description_or_else_the_name(
    name: str, description: str, task: tuple[str, str]
) -> None:
    assert task_of({"name": name, "description": description}) == task


def test_names_are_split_into_words() -> None:
    assert name_words("API-listPull_requests") == "list pull requests"
