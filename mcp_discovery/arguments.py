"""The arguments of `discover_tools`: their published schema, and one sentence for each that is bad."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from mcp_discovery.discovery.call import DiscoverRequest

MAX_QUERY = 4000  # characters
MAX_LIMIT = 20
MAX_NAMES = 100
MAX_ITEMS = 1000  # of the other array arguments
MAX_ITEM = 600  # characters of an array's items
MIN_RESPONSE_TOKENS = 64
MAX_TIMEOUT_MS = 60_000

Detail = Literal["full", "compact", "names"]


def _integral(value: object) -> object:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_blank(value: str) -> bool:
    """Nothing but separators and characters that show nothing, such as zero-width ones."""
    return all(unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs") for character in value)


def _not_blank(value: str) -> str:
    if _is_blank(value):
        raise ValueError("blank")
    return value


Item = Annotated[str, Field(min_length=1, max_length=MAX_ITEM)]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS)]
Integral = BeforeValidator(_integral)

# "Not given" is no value of an argument's type, so it stays out of the published schema.
Unset = SkipJsonSchema[None]


class Arguments(BaseModel):
    """Flat JSON types, each with its range; anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY), AfterValidator(_not_blank)] | Unset = (
        Field(default=None, description="The task at hand, in any language. Required unless names is given.")
    )
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT), Integral] | Unset = Field(
        default=None,
        description="Most tools to return. A query that names more tools than the default gets them all.",
    )
    detail: Detail = Field(
        default="full",
        description="full: whole definitions; compact: descriptions and parameter names; names: names only.",
    )
    servers: Items = Field(default_factory=list, description="Look only at the tools of these servers.")
    exclude: Items = Field(
        default_factory=list, description="Tools already at hand, as server/tool; they are not returned."
    )
    names: Annotated[list[Item], Field(max_length=MAX_NAMES)] = Field(
        default_factory=list,
        description="Load exactly these tools: server/tool, or a tool name that only one server has. "
        "The query is not looked at.",
    )
    read_only: bool = Field(
        default=False, description="Only tools that say they change nothing (readOnlyHint)."
    )
    max_response_tokens: Annotated[int, Field(ge=MIN_RESPONSE_TOKENS), Integral] | Unset = Field(
        default=None,
        description="Cut definitions until the structured result takes at most so many tokens (characters "
        "divided by 4). No name is dropped; truncated says that something was cut.",
    )
    min_score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | Unset = Field(
        default=None,
        description="Offer no tool whose probability of serving the task is lower; 0 offers the nearest "
        "tools whatever they are. Left out, nothing is offered where no tool seems to serve the task.",
    )
    explain: bool = Field(default=False, description="Give a short reason with each tool.")
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS), Integral] = Field(
        default=10_000,
        description="Milliseconds, end to end; what cannot be done in time is refused at once.",
    )

    @property
    def request(self) -> DiscoverRequest:
        return DiscoverRequest(
            query=self.query or "",
            limit=self.limit,
            servers=tuple(self.servers),
            exclude=tuple(self.exclude),
            names=tuple(self.names),
            read_only=self.read_only,
            min_score=self.min_score,
            explain=self.explain,
        )


_EXPECTED = {
    "query": f"text of 1 to {MAX_QUERY:,} characters that is not all white space",
    "limit": f"an integer from 1 to {MAX_LIMIT}",
    "detail": "one of full, compact and names",
    "max_response_tokens": f"an integer of at least {MIN_RESPONSE_TOKENS}",
    "min_score": "a number from 0 to 1",
    "read_only": "true or false",
    "explain": "true or false",
    "timeout_ms": f"an integer from 1 to {MAX_TIMEOUT_MS:,}",
    **{
        name: f"a list of at most {most:,} texts of 1 to {MAX_ITEM} characters each"
        for name, most in (("servers", MAX_ITEMS), ("exclude", MAX_ITEMS), ("names", MAX_NAMES))
    },
}
MAX_REPORTED = 5  # sentences of one refusal


def parse(arguments: Mapping[str, Any] | None) -> Arguments | str:
    """The arguments, or what is wrong with them: one sentence each, the first `MAX_REPORTED` of them."""
    given = arguments or {}
    # Checked here since null would pass for "not given", and an unknown name may be no text at all.
    early = [name for name, value in given.items() if name not in _EXPECTED or value is None]
    if early:
        return _sentences(early, given)
    try:
        parsed = Arguments.model_validate(given)
    except ValidationError as error:
        # The members of an array are reported one by one; its name is enough once.
        names = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False))
        return _sentences(names, given)
    if parsed.query is None and not parsed.names:
        return f"Argument 'query' is required unless 'names' is given: {_EXPECTED['query']}."
    return parsed


def input_schema(*, limit: int, min_score: float | None) -> dict[str, Any]:
    """The published schema, with the site's defaults; every property has one flat JSON type."""
    schema = tidy(Arguments.model_json_schema())
    schema["properties"]["limit"]["default"] = limit
    if min_score is not None:
        schema["properties"]["min_score"]["default"] = min_score
    return {"type": "object", "properties": schema["properties"], "additionalProperties": False}


def tidy(schema: Any) -> Any:
    """A generated schema without its titles and its null defaults."""
    if isinstance(schema, list):
        return [tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: tidy(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None)
    }


def _sentences(names: Iterable[str], given: Mapping[str, Any]) -> str:
    return " ".join(_sentence(name, given[name]) for name in islice(names, MAX_REPORTED))


def _sentence(name: str, value: object) -> str:
    if name not in _EXPECTED:
        return (
            f"Argument {_shown(name)} is unknown; discover_tools takes {', '.join(Arguments.model_fields)}."
        )
    return f"Argument {name!r} must be {_EXPECTED[name]}; it is {_described(name, value)}."


def _described(name: str, value: object) -> str:
    if value is None:
        return "null (leave it out instead)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if name == "query" and _is_blank(value):
            return "all white space" if value else "empty"
        if any("\ud800" <= character <= "\udfff" for character in value):
            return "text that is not valid Unicode"
        return _shown(value) if len(value) <= MAX_ITEM else f"text of {len(value):,} characters"
    if isinstance(value, list):
        bad = next((item for item in value if not (isinstance(item, str) and 0 < len(item) <= MAX_ITEM)), "")
        what = _kind(bad) if not isinstance(bad, str) else f"text of {len(bad):,} characters"
        return f"a list of {len(value):,}" + (f" that holds {what}" if bad != "" or "" in value else "")
    return _number(value) if isinstance(value, int | float) else _kind(value)


def _number(value: float) -> str:
    """As it was written, where it is short."""
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    return str(value) if abs(value) < 1e15 else "a number of more than 15 digits"


def _kind(value: object) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), "text")


def _shown(text: str) -> str:
    """Quoted, short, and free of what a terminal or an encoder could stumble over."""
    return (
        ascii(text if len(text) <= 60 else text[:59] + "...") if not text.isprintable() else repr(text[:60])
    )
