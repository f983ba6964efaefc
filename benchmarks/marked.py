"""The generated section of a page, between two marks."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
END = "<!-- end -->"


def replaced(page: str, lines: Iterable[str], begin: str) -> str:
    """`page` with other lines between its marks, `begin` and `END`. Raises ValueError where it lacks them."""
    marked = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
    if len(marked.findall(page)) != 1:
        raise ValueError(f"the page needs one {begin} and one {END} after it")
    text = "\n".join((begin, "", *lines, "", END))
    return marked.sub(lambda _: text, page)


def fill(
    description: str | None,
    section: Callable[[Mapping[str, Any], str], Iterable[str]],
    begin: str,
    *,
    result: str,
    page: str,
) -> None:
    """The command of a section that one result file makes: `section(results, file name)`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--result", type=Path, default=FOLDER / "results" / result)
    parser.add_argument("--page", type=Path, default=FOLDER.parent / "docs" / page)
    given = parser.parse_args()
    lines = section(json.loads(given.result.read_text(encoding="utf-8"))["results"], given.result.name)
    text = given.page.read_text(encoding="utf-8")
    given.page.write_text(replaced(text, lines, begin), encoding="utf-8")
    print(f"wrote {given.page}")
