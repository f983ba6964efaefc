"""Queries of our own for load runs: made from the demo catalogue, the same for the same seed.

    python -m benchmarks.queries [--per-tool 16] [--seed 1] [--out FILE]

Each query asks for one tool of the demo catalogue and names it in `about`. The task comes from the tool's own
description, the details from its parameters, the rest from the phrases below. The queries are for load and
for checks against a reference: as they borrow the tools' words, they say nothing about retrieval quality.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "mcp_discovery" / "data" / "demo"
QUERIES = ROOT / "benchmarks" / "data" / "queries.jsonl"

MIN_WORDS, MAX_WORDS = 3, 40
TASK_WORDS = 16
PER_TOOL, SEED = 16, 1
ATTEMPTS = 200

# Other words for the verb that a description begins with. A verb that is not here stays as it is, and a
# description that begins with something else is left for the tool's name.
VERBS: dict[str, tuple[str, ...]] = {
    "add": ("attach", "put in"),
    "append": ("add",),
    "apply": (),
    "archive": (),
    "calculate": ("compute", "work out"),
    "capture": ("take",),
    "check": ("look up",),
    "cleanup": (),
    "clear": ("wipe",),
    "click": (),
    "close": (),
    "compose": ("write",),
    "convert": ("turn",),
    "copy": (),
    "crawl": (),
    "create": ("make", "set up", "add"),
    "delete": ("remove", "get rid of"),
    "describe": ("explain",),
    "download": ("save",),
    "drop": (),
    "emulate": (),
    "evaluate": ("run",),
    "execute": ("run",),
    "expand": (),
    "export": (),
    "extract": ("pull out",),
    "fetch": ("get", "pull"),
    "fill": (),
    "find": ("search for",),
    "fork": (),
    "forward": (),
    "get": ("fetch", "look up", "pull up"),
    "go": (),
    "handle": (),
    "hover": (),
    "import": (),
    "insert": ("add",),
    "install": (),
    "list": ("show", "get a list of", "look through"),
    "make": (),
    "manage": (),
    "map": (),
    "mark": (),
    "merge": (),
    "move": (),
    "navigate": (),
    "open": (),
    "perform": ("do",),
    "place": ("put",),
    "post": ("send", "write"),
    "press": (),
    "push": (),
    "read": ("open", "go through"),
    "rebuild": (),
    "record": (),
    "remove": ("delete", "take out"),
    "rename": (),
    "reopen": (),
    "replace": (),
    "reply": ("respond",),
    "resize": (),
    "resolve": (),
    "restrict": ("limit",),
    "retrieve": ("get", "fetch", "load"),
    "return": ("get",),
    "run": ("execute",),
    "save": ("store",),
    "scale": (),
    "search": ("look",),
    "select": ("choose",),
    "send": (),
    "set": (),
    "show": ("display", "look at"),
    "sort": ("order",),
    "stop": (),
    "switch": (),
    "take": (),
    "trace": (),
    "type": (),
    "uninstall": (),
    "unstage": (),
    "update": ("change", "edit", "modify"),
    "upgrade": (),
    "upload": (),
    "verify": ("check",),
    "wait": (),
    "write": (),
}

# Values for a parameter, by what one word of its name ends with; the first match is taken.
VALUES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "url",
        ("https://example.com/pricing", "https://example.org/blog/2026", "https://docs.example.net/start"),
    ),
    ("path", ("reports/march.csv", "src/app/main.py", "notes/todo.md", "invoices/2026", "data/input.json")),
    ("file", ("budget.xlsx", "readme.md", "summary.pdf", "backup.tar.gz")),
    ("repo", ("web-shop", "billing-service", "docs-site", "mobile-app")),
    ("branch", ("main", "release-2.4", "fix-login", "feature/search")),
    ("email", ("ana@example.com", "support@example.org", "li.wei@example.net")),
    ("recipient", ("ana@example.com", "the whole sales team")),
    ("zone", ("Europe/Lisbon", "Asia/Tokyo", "America/Chicago")),
    ("time", ("09:30", "yesterday at noon", "2026-03-01T08:00", "next Monday")),
    ("date", ("2026-01-31", "last Friday", "the first of May")),
    ("latitude", ("52.52", "-33.87", "19.43")),
    ("longitude", ("13.40", "151.21", "-99.13")),
    ("location", ("Oslo", "Nairobi", "Kyoto", "Porto Alegre")),
    ("address", ("12 Harbour Street, Bergen", "Praça da Sé, São Paulo")),
    ("origin", ("Lyon station", "the airport")),
    ("destination", ("the old town", "Geneva")),
    ("channel", ("#support", "#release-news", "#random")),
    ("namespace", ("staging", "payments", "monitoring")),
    ("sheet", ("Sales", "Q3 forecast", "Inventory")),
    ("range", ("B2:F40", "A1:C12", "D:D")),
    ("cell", ("C7", "H19")),
    ("query", ("late deliveries", "solar panels", "unpaid invoices", "graph neural networks", "budget 2026")),
    ("topic", ("protein folding", "battery recycling", "zero-knowledge proofs")),
    ("table", ("customers", "orders", "sensor_readings")),
    ("database", ("analytics", "shop", "telemetry")),
    ("index", ("logs-2026", "products")),
    ("title", ("Login fails on Safari", "Weekly notes", "Roadmap draft")),
    ("body", ("please review by Friday", "the build is green again")),
    ("text", ("thanks, looks good", "the meeting moved to Tuesday")),
    ("content", ("a short summary", "the meeting notes")),
    ("message", ("deploy finished", "see you at ten")),
    ("description", ("a short explanation", "what changed and why")),
    ("label", ("urgent", "waiting", "home")),
    ("project", ("Website relaunch", "Garden", "Thesis")),
    ("user", ("Maria", "the new colleague", "U024BE7LH")),
    ("owner", ("our organisation", "octo-team")),
    ("name", ("Apollo", "nightly-backup", "Team offsite", "checkout")),
    ("id", ("4711", "a1b2c3", "rec0042", "2301.07041")),
    ("number", ("42", "1280", "7")),
    ("limit", ("10", "50")),
    ("count", ("3", "25")),
)

DETAILS = (
    ", {key} {value}",
    " with {value} as the {key}",
    " where the {key} is {value}",
    " for {key} {value}",
    " ({key}: {value})",
    " and use {value} for the {key}",
)
REASONS = (
    "so that the team can review it this afternoon",
    "because a customer is waiting for an answer",
    "before the meeting at three",
    "as the first step of the monthly clean-up",
    "and keep the rest exactly as it is",
    "since the numbers from last week look wrong",
    "to finish the report my manager asked for",
    "while I write the summary for everybody else",
    "without touching anything that others work on",
    "and tell me afterwards what changed",
)
OPENERS = (
    "I'm preparing a hand-over for a new colleague.",
    "We are moving the project to another team next week.",
    "Something broke last night and I am trying to understand why.",
    "I have about ten minutes left before I must leave.",
    "This is part of a larger job that runs every morning.",
    "My notes are a mess and I want to put them in order.",
    "The client called again with the same question.",
    "I am new to this and do not know which tool is right.",
)
SHORT = (
    "{task}",
    "{task} please",
    "{server}: {task}",
    "{name} in {server}",
    "tool for {name}",
    "{name} {server} {key}",
    "how to {task}",
)
QUESTIONS = (
    "Can you {task}{detail}?",
    "Could you please {task}{detail}?",
    "How do I {task}{detail}?",
    "Is there a way to {task}{detail}?",
    "Which tool lets me {task} with {server}?",
    "What should I call to {task}{detail}?",
    "Is {server} able to {task}{detail}?",
)
REQUESTS = (
    "I need to {task}{detail}.",
    "Please {task}{detail}.",
    "I want to {task}{detail}, {reason}.",
    "Help me {task}{detail} {reason}.",
    "Use {server} to {task}{detail}.",
    "Now {task}{detail} {reason}",
    "Next step: {task}{detail}",
)
STORIES = (
    "{opener} Please {task}{detail}.",
    "{opener} Can you {task}{detail} {reason}?",
    "{opener} I would like to {task}{detail}, {reason}.",
    "{opener} What I need now is to {task}{detail}.",
)
STYLES = (SHORT, QUESTIONS, REQUESTS, STORIES)


@dataclass(frozen=True, slots=True)
class Query:
    """One query. `about` is the `server/tool` it was made from."""

    id: str
    query: str
    about: str


def load_queries(path: Path = QUERIES) -> list[Query]:
    """The committed queries, in file order: neighbours ask for different tools."""
    with path.open(encoding="utf-8") as lines:
        return [Query(**json.loads(line)) for line in lines]


def load_tools(folder: Path = DEMO) -> list[dict[str, Any]]:
    """Every tool of the demo catalogue, by file name and then as served."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


# --- what a tool is for, in the words of a person ---------------------------------------------------


def task_of(tool: dict[str, Any]) -> tuple[str, str]:
    """The task as (verb, rest), from the first sentence of the description or else from the name."""
    sentence = _first_sentence(tool.get("description") or "")
    verb, _, rest = sentence.partition(" ")
    verb = _base_form(verb.split("/")[0].lower().rstrip(","))
    if verb in VERBS and rest:
        return verb, rest
    words = name_words(tool["name"]).split(" ", 1)
    if words[0] in VERBS and len(words) == 2:
        return words[0], words[1]
    return "use", "the " + " ".join(words) + " tool"


def _first_sentence(description: str) -> str:
    # A line break that a capital follows starts a new paragraph; any other only wraps the line.
    text = re.split(r"\n\s*(?:\n|(?=[A-Z]))", description.strip(), maxsplit=1)[0]
    for _ in range(2):  # brackets inside brackets
        text = re.sub(r"\([^()]*\)|`", "", text)
    text = re.sub(r" +(?=[,.])|^[^|.]{1,20} \| ", "", " ".join(text.split()))
    sentence = re.split(r"[.;:!?](?:\s|$)| — | - ", text, maxsplit=1)[0]
    while len(sentence.split()) > TASK_WORDS and "," in sentence:
        sentence = sentence.rpartition(",")[0]
    return " ".join(sentence.replace("_", " ").split()[:TASK_WORDS])


def _base_form(verb: str) -> str:
    if verb.endswith(("ches", "shes")):
        return verb[:-2]
    return verb[:-1] if verb.endswith("s") and not verb.endswith("ss") else verb


def name_words(name: str) -> str:
    """`list_pull_requests`, `listPullRequests` and `API-list-pull-requests` as plain words."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|[_\-.]+", " ", name)
    return spaced.lower().removeprefix("api ").strip()


def details_of(tool: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """The parameters that a person would give a value for, as (words, possible values)."""
    details = []
    for key, schema in tool["inputSchema"].get("properties", {}).items():
        words = name_words(key)
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if choices and all(isinstance(choice, str) and choice for choice in choices):
            details.append((words, tuple(choices)))
        elif values := _values_for(words):
            details.append((words, values))
    return details


def _values_for(words: str) -> tuple[str, ...]:
    ends = [word.removesuffix("s") for word in words.split()]
    for part, values in VALUES:
        if any(end == part or (len(part) > 2 and end.endswith(part)) for end in ends):
            return values
    return ()


# --- phrasing ----------------------------------------------------------------------------------------


def phrase(tool: dict[str, Any], rng: random.Random) -> str:
    """One query about `tool`, in a random style."""
    verb, rest = task_of(tool)
    others = () if rest.startswith(("and ", "or ")) else VERBS.get(verb, ())
    details = details_of(tool)
    key, values = rng.choice(details) if details else (rest, ())
    detail = rng.choice(DETAILS).format(key=key, value=rng.choice(values)) if values else ""
    return rng.choice(rng.choice(STYLES)).format(
        task=f"{rng.choice((verb, verb, *others))} {rest}",
        name=name_words(tool["name"]),
        server=tool["server"].replace("-", " "),
        key=key,
        detail=detail if rng.random() < 0.7 else "",
        reason=rng.choice(REASONS),
        opener=rng.choice(OPENERS),
    )


def generate(tools: Sequence[dict[str, Any]], per_tool: int = PER_TOOL, seed: int = SEED) -> list[Query]:
    """`per_tool` queries for each tool, unique without regard to case, of 3 to 40 words, shuffled.

    Raises:
        ValueError: a tool does not yield `per_tool` different queries.
    """
    seen: set[str] = set()
    made: list[tuple[str, str]] = []
    for tool in tools:
        about = f"{tool['server']}/{tool['name']}"
        # Its own generator: a tool that joins the catalogue leaves the other tools' phrases as they are.
        rng = random.Random(f"{seed}:{about}")
        texts = list(islice(_unseen(tool, rng, seen), per_tool))
        if len(texts) < per_tool:
            raise ValueError(f"{about} yields only {len(texts)} different queries; ask for fewer per tool")
        made += [(text, about) for text in texts]
    random.Random(seed).shuffle(made)
    return [Query(f"q{number:05d}", text, about) for number, (text, about) in enumerate(made)]


def _unseen(tool: dict[str, Any], rng: random.Random, seen: set[str]) -> Iterator[str]:
    for _ in range(ATTEMPTS):
        text = phrase(tool, rng)
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS and text.casefold() not in seen:
            seen.add(text.casefold())
            yield text


def as_lines(queries: Sequence[Query]) -> str:
    """The queries as JSON Lines."""
    rows = ({"id": q.id, "query": q.query, "about": q.about} for q in queries)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queries")
    parser.add_argument("--per-tool", type=int, default=PER_TOOL, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=QUERIES, metavar="FILE")
    options = parser.parse_args(argv)
    queries = generate(load_tools(), options.per_tool, options.seed)
    options.out.write_text(as_lines(queries), encoding="utf-8")
    print(f"{len(queries)} queries about {len({q.about for q in queries})} tools in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
