"""Requests made up from a tool's own text, for tools that nobody has written a request for.

A description such as "Creates a new issue in a repository." becomes "I need to open a new issue in my
repository" by rules: the verb goes to its base form and may be replaced by another of its group, the
object gets a speaker's words ("the user's" is "my"), a frame makes it a request, and values for some
parameters may follow. Seeded by the caller's generator; no model is involved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.prompts import words_of

# Verbs that stand for one another at the head of a request.
VERB_GROUPS: tuple[tuple[str, ...], ...] = (
    ("get", "fetch", "show me", "look up", "find", "give me", "pull up", "tell me", "check", "retrieve"),
    ("list", "show me", "show me all", "give me a list of", "display", "what are", "get all", "enumerate"),
    ("search", "search for", "find", "look for", "look up", "hunt for"),
    ("create", "make", "add", "set up", "open", "start", "build", "put together"),
    ("add", "put", "insert", "include", "attach", "append"),
    ("delete", "remove", "get rid of", "drop", "erase", "clear out"),
    ("update", "change", "edit", "modify", "adjust", "revise"),
    ("send", "deliver", "shoot off", "submit", "post"),
    ("generate", "create", "produce", "make", "come up with"),
    ("calculate", "compute", "work out", "figure out", "determine"),
    ("analyze", "examine", "look into", "study", "break down", "evaluate"),
    ("convert", "turn", "change", "transform", "translate"),
    ("execute", "run", "perform", "carry out"),
    ("run", "execute", "start", "launch", "kick off"),
    ("check", "verify", "see", "find out", "make sure of", "inspect"),
    ("validate", "check", "verify"),
    ("read", "open", "view", "show me", "load"),
    ("write", "save", "store", "put"),
    ("download", "grab", "get", "save"),
    ("upload", "send up", "put", "push"),
    ("schedule", "book", "plan", "arrange", "set up"),
    ("set", "change", "configure", "adjust"),
    ("cancel", "call off", "abort", "stop"),
    ("stop", "halt", "end", "shut down", "terminate"),
    ("start", "launch", "begin", "fire up", "boot"),
    ("monitor", "watch", "keep an eye on", "track"),
    ("track", "follow", "monitor", "trace"),
    ("compare", "contrast", "weigh up"),
    ("summarize", "sum up", "give me the gist of", "condense"),
    ("extract", "pull out", "get", "take out"),
    ("navigate", "go", "browse", "head"),
    ("recommend", "suggest", "propose"),
    ("move", "transfer", "shift", "relocate"),
    ("rename", "give a new name to", "change the name of"),
    ("explain", "describe", "clarify", "walk me through"),
)
SYNONYMS: dict[str, tuple[str, ...]] = {group[0]: group[1:] for group in VERB_GROUPS} | {
    "retrieve": VERB_GROUPS[0],
    "fetch": VERB_GROUPS[0],
    "return": VERB_GROUPS[0],
    "obtain": VERB_GROUPS[0],
    "find": VERB_GROUPS[2],
    "modify": VERB_GROUPS[6],
    "edit": VERB_GROUPS[6],
    "remove": VERB_GROUPS[5],
    "compute": VERB_GROUPS[9],
    "analyse": VERB_GROUPS[10],
    "perform": VERB_GROUPS[12],
    "display": VERB_GROUPS[1],
    "verify": VERB_GROUPS[14],
    "view": VERB_GROUPS[16],
    "insert": VERB_GROUPS[4],
}
VERBS = frozenset(verb for verb in SYNONYMS) | frozenset(
    [
        "access",
        "activate",
        "allow",
        "apply",
        "approve",
        "archive",
        "ask",
        "assign",
        "authenticate",
        "book",
        "capture",
        "change",
        "clear",
        "click",
        "clone",
        "close",
        "combine",
        "commit",
        "configure",
        "connect",
        "copy",
        "count",
        "debug",
        "decode",
        "define",
        "deploy",
        "describe",
        "detect",
        "determine",
        "disable",
        "discover",
        "draw",
        "drop",
        "duplicate",
        "enable",
        "encode",
        "estimate",
        "evaluate",
        "export",
        "fill",
        "filter",
        "focus",
        "format",
        "forward",
        "group",
        "identify",
        "import",
        "initialize",
        "inspect",
        "install",
        "invite",
        "invoke",
        "join",
        "launch",
        "load",
        "lock",
        "log",
        "login",
        "look",
        "make",
        "manage",
        "mark",
        "match",
        "merge",
        "open",
        "optimize",
        "parse",
        "pause",
        "pin",
        "plan",
        "play",
        "post",
        "predict",
        "preview",
        "print",
        "process",
        "provide",
        "publish",
        "pull",
        "push",
        "put",
        "query",
        "rank",
        "reboot",
        "record",
        "refresh",
        "register",
        "reject",
        "release",
        "render",
        "reopen",
        "replace",
        "reply",
        "report",
        "request",
        "reserve",
        "reset",
        "resize",
        "resolve",
        "restart",
        "restore",
        "resume",
        "review",
        "revoke",
        "rotate",
        "save",
        "scan",
        "scrape",
        "select",
        "share",
        "show",
        "simulate",
        "sort",
        "split",
        "stage",
        "store",
        "stream",
        "submit",
        "subscribe",
        "suggest",
        "switch",
        "sync",
        "take",
        "tell",
        "test",
        "toggle",
        "train",
        "transcribe",
        "translate",
        "trigger",
        "type",
        "undo",
        "unlock",
        "unsubscribe",
        "use",
        "visualize",
        "wait",
        "watch",
        "withdraw",
    ]
)
RETRIEVAL = frozenset(
    ["get", "fetch", "retrieve", "return", "list", "show", "display", "view", "lookup", "find", "check"]
)

FRAMES = (
    *("{}",) * 8,
    "please {}",
    "{} please",
    "can you {}?",
    "Can you please {}?",
    "could you {}?",
    "Could you {} for me?",
    "I need to {}",
    "I need you to {}.",
    "I want to {}",
    "I'd like to {}.",
    "I would like you to {}",
    "help me {}",
    "Can you help me {}?",
    "how do I {}?",
    "how can I {}",
    "is there a way to {}?",
    "I have to {} today",
    "we need to {}",
    "let's {}",
    "hey, {}",
    "need to {} asap",
    "My task is to {}.",
    "I'm trying to {}",
    "Go ahead and {}.",
)
NOUN_FRAMES = (
    "{}",
    "{}?",
    "what is {}?",
    "What's {}?",
    "show me {}",
    "I need {}",
    "I'm looking for {}",
    "where can I see {}?",
    "do you have {}?",
    "I want to know {}",
    "I'm curious about {}.",
    "let me see {}",
    "any info on {}?",
    "{} please",
)
SPEAKER = (
    (
        re.compile(r"\bthe (?:current |authenticated |logged[- ]in )?user'?s\b", re.I),
        ("my", "my", "the user's"),
    ),
    (
        re.compile(r"\b(?:a|the) (?:specific|specified|given|particular|single|certain)\b", re.I),
        ("this", "the", "a", "my"),
    ),
    (re.compile(r"\b(?:specific|specified|given)\s", re.I), ("", "")),
    (re.compile(r"\ban? existing\b", re.I), ("the", "my", "this")),
    (
        re.compile(r"\b(?:by|using) (?:its|their|the) (?:unique )?(?:id|identifier|key|uuid)s?\b", re.I),
        ("", "", "by id"),
    ),
    (re.compile(r"\b(?:via|using|through|with|from) (?:the )?[\w ]{0,30} API\b", re.I), ("", "")),
)
NOISE = re.compile(
    r"^(?:this (?:tool|function|api|method|endpoint)\s+"
    r"(?:will |can |is used to |allows (?:you|users) to |lets you )?"
    r"|(?:a |the )?(?:tool|function|api|endpoint|utility) (?:that |to |for |which )+"
    r"|use this (?:tool )?(?:to|when(?: you need to)?) |used to |allows (?:you|users) to |lets you "
    r"|helps? (?:you )?(?:to )?"
    r"|quickly |easily |\[[^\]]{1,30}\]\s*|[^\w\s]+\s*)+",
    re.I,
)
SENTENCE_END = re.compile(
    r"(?<=[.!?。！？])\s+|(?<=[。！？])|\n\s*\n|\s*\n\s*(?=Args?:|Parameters?:|Returns?:|Example|[-*])"
)

NAMES = [
    "Alice",
    "Bob",
    "Maria",
    "Chen",
    "Priya",
    "Omar",
    "Jonas",
    "Lena",
    "Diego",
    "Yuki",
    "Fatima",
    "Ivan",
    "Grace",
    "Tom",
    "Aisha",
    "Noah",
]
PLACES = [
    "Berlin",
    "Tokyo",
    "Boston",
    "Paris",
    "Mumbai",
    "São Paulo",
    "Toronto",
    "Seoul",
    "Lagos",
    "Madrid",
    "Oslo",
    "Denver",
]
TOPICS = [
    "quarterly report",
    "solar panels",
    "login bug",
    "machine learning",
    "marketing plan",
    "climate change",
    "team offsite",
    "coffee shops",
    "release notes",
    "road map",
    "onboarding",
    "payment errors",
    "photosynthesis",
    "interest rates",
]
FILES = [
    "report.pdf",
    "notes.txt",
    "data.csv",
    "src/main.py",
    "README.md",
    "photo.png",
    "config.yaml",
    "budget.xlsx",
]


def first_sentence(description: str) -> tuple[str, str]:
    """The first sentence of a description and the rest, white space collapsed."""
    head, *rest = SENTENCE_END.split(description.strip(), maxsplit=1)
    return " ".join(head.split()), " ".join(" ".join(rest).split())


def base_form(word: str) -> str | None:
    """`creates` and `Create` are `create`; None where the word is no known verb."""
    word = word.lower()
    endings = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    gerund = word.removesuffix("ing")
    candidates = endings if gerund == word else (gerund, gerund + "e", gerund[:-1])
    return next((form for form in candidates if form in VERBS), None)


def split_verb(sentence: str) -> tuple[str | None, str]:
    """The base form of a leading verb and what follows it; (None, sentence) without one."""
    sentence = NOISE.sub("", sentence).strip().rstrip(".。!:;,")
    head, _, rest = sentence.partition(" ")
    verb = base_form(head)
    return (verb, rest.strip()) if verb and rest else (None, sentence)


def product_of(server: str) -> str:
    """The product a server serves, as its name tells: `owner_github-mcp-server` is `github`."""
    name = server.split("_", 1)[-1] if "_" in server and "-" in server else server
    dull = {"mcp", "server", "servers", "api", "test", "tool", "tools", "integration", "demo"}
    return " ".join(word for word in words_of(name).split() if word not in dull)


def made_up_request(tool: Tool, rng: random.Random) -> str:
    """One request that `tool` serves. Never empty."""
    sentence, _ = first_sentence(tool.description)
    name = words_of(tool.name)
    roll = rng.random()
    if not sentence or roll < 0.16:
        verb, rest = split_verb(name)
        rest = rest if verb else name
    else:
        sentence = _trimmed(sentence, rng)
        verb, rest = split_verb(sentence)
    text = _framed(verb, _spoken(rest, rng), rng)
    if rng.random() < 0.45:
        text = _with_values(text, tool.input_schema, rng)
    product = product_of(tool.server)
    if product and rng.random() < 0.25 and product not in text.lower():
        text = _end(
            text, rng.choice((f" in {product}", f" on {product}", f" using {product}", f" ({product})"))
        )
        if rng.random() < 0.2:
            text = f"{product}: {text}"
    return text.strip() or name or tool.name


def _trimmed(sentence: str, rng: random.Random) -> str:
    """A long sentence loses a trailing clause more often than not; speakers are short."""
    if len(sentence) > 90 and rng.random() < 0.7:
        cut = re.split(r",| including | such as | with | which | that |;| - | \(", sentence, maxsplit=1)[0]
        if len(cut) > 20:
            return cut
    return sentence[:240]


def _spoken(text: str, rng: random.Random) -> str:
    for pattern, choices in SPEAKER:
        text = pattern.sub(rng.choice(choices), text)
    if rng.random() < 0.25:
        text = re.sub(r"\ban? (?=\w)", rng.choice(("my ", "the ", "this ", "a new ")), text, count=1)
    return " ".join(text.split())


def _framed(verb: str | None, rest: str, rng: random.Random) -> str:
    if verb is None:
        if rest.isascii():
            return rng.choice(NOUN_FRAMES).format(rest[:1].lower() + rest[1:]) if rng.random() < 0.7 else rest
        return rest
    if verb in RETRIEVAL and rng.random() < 0.35:
        return rng.choice(NOUN_FRAMES).format(rest)
    if rng.random() < 0.5 and verb in SYNONYMS:
        verb = rng.choice(SYNONYMS[verb])
        if verb.endswith((" for", " all", " of")):
            rest = re.sub(r"^(?:for|all|of) ", "", rest)
    phrase = f"{verb} {rest}"
    frame = rng.choice(FRAMES)
    text = frame.format(phrase)
    return text[:1].upper() + text[1:] if rng.random() < 0.6 else text


def _end(text: str, addition: str) -> str:
    """`addition` put before the final mark of `text`."""
    body = text.rstrip(".?! ")
    return body + addition + text[len(body) :].strip()


def _with_values(text: str, schema: Mapping[str, Any], rng: random.Random) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return text
    names = rng.sample(list(properties), min(len(properties), rng.choice((1, 1, 2, 3))))
    parts = []
    for name in names:
        value = _value(str(name), properties[name], rng)
        if value is None:
            continue
        words = words_of(str(name))
        shape = rng.choice(
            ("{v}", "{v}", "{n} {v}", "{n} is {v}", "{n}: {v}", "with {n} {v}", "for {v}", "the {n} {v}")
        )
        parts.append(shape.format(n=words, v=value))
    if not parts:
        return text
    joined = rng.choice((" and ", ", ", " ")).join(parts)
    if rng.random() < 0.15:
        return f"{joined}. {text}"
    return _end(text, rng.choice((" ", " ", ", ", ". ", " for ", " with ")) + joined)


def _value(name: str, schema: object, rng: random.Random) -> str | None:
    """A plausible value of a parameter, or None where nothing plausible is known."""
    schema = schema if isinstance(schema, Mapping) else {}
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return str(rng.choice(options))[:40]
    kind, words = schema.get("type"), set(words_of(name).split())
    if kind in ("boolean", "object"):
        return None
    if kind in ("integer", "number"):
        return str(rng.choice((rng.randint(1, 20), rng.randint(1, 2000), round(rng.uniform(0, 100), 2))))
    quote = rng.choice(("'{}'", '"{}"', "{}", "{}"))
    if words & {"id", "ids", "uuid", "key", "hash", "sid", "number", "code"}:
        return rng.choice((str(rng.randint(1000, 9999999)), f"{rng.choice('ABCXYZ')}{rng.randint(10, 9999)}"))
    if words & {"email", "recipient", "to", "mail"}:
        return f"{rng.choice(NAMES).lower()}@example.com"
    if words & {"date", "day", "start", "end", "from", "until", "since", "time"}:
        return rng.choice(
            (
                f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
                "tomorrow",
                "next Monday",
                "3pm",
                "last week",
                "today",
            )
        )
    if words & {"url", "link", "uri", "website", "domain"}:
        return f"https://example.com/{rng.choice(('docs', 'item', 'page'))}/{rng.randint(1, 99)}"
    if words & {"path", "file", "filename", "directory", "folder"}:
        return rng.choice(("", "/home/me/", "./")) + rng.choice(FILES)
    if words & {"city", "location", "place", "address", "country", "destination", "origin", "region"}:
        return rng.choice(PLACES)
    if words & {"name", "user", "username", "owner", "author", "person", "contact", "assignee"}:
        return quote.format(rng.choice(NAMES))
    if words & {
        "query",
        "q",
        "search",
        "keyword",
        "keywords",
        "topic",
        "title",
        "subject",
        "text",
        "content",
        "message",
    }:
        return quote.format(rng.choice(TOPICS))
    return None
