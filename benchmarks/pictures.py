"""Draws the ladder's result files as SVG.

    python -m benchmarks.pictures [--results DIR] [--out docs/pictures]

Each picture is drawn from whatever files of `benchmarks.ladder` are there, those of a card before those of a
CPU: the ladders' throughput, latency and refusals by clients, memory over time against the plan, and the
burst's time line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
COLOURS = ("#1f5fa8", "#c4451c", "#2e7d4f", "#7a4ba0", "#8a6d1b", "#3b8ea5")
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 40, 52
TICKS = 6

Point = tuple[float, float]
Results = Mapping[str, dict[str, Any]]
"""Result files by the name of their part, such as `ladder-idle`."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; a dashed one is a bound."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one x axis. An axis with a base is logarithmic, and leaves out what is not above zero."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    base_x: int = 0
    base_y: int = 0
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)

    def svg(self) -> str:
        """Raises ValueError where there is nothing to draw."""
        drawn = [Series(s.name, [p for p in s.points if self._shown(p)], s.dashed) for s in self.series]
        drawn = [series for series in drawn if series.points]
        points = [point for series in drawn for point in series.points]
        if not points:
            raise ValueError(f"{self.title}: there are no points")
        x = Axis.over([px for px, _ in points], self.base_x, LEFT, WIDTH - RIGHT)
        y = Axis.over([py for _, py in points], self.base_y, HEIGHT - BOTTOM, TOP, from_zero=True)
        return "\n".join([*self._frame(), *_grid(x, y), *self._marked(x), *_lines(drawn, x, y), "</svg>\n"])

    def _shown(self, point: Point) -> bool:
        return (point[0] > 0 or not self.base_x) and (point[1] > 0 or not self.base_y)

    def _frame(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="sans-serif" font-size="12" fill="#333"><title>{escape(self.title)}</title>'
        )
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        yield f'<text x="{LEFT}" y="20" font-size="15">{escape(self.title)}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(self.x_label)}</text>'
        across = (TOP + HEIGHT - BOTTOM) / 2
        yield (
            f'<text transform="translate(16 {across:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )

    def _marked(self, x: Axis) -> Iterator[str]:
        for value, text in self.marks:
            if x.low <= value <= x.high:
                at = x.place(value)
                yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>'
                yield (
                    f'<text transform="translate({at + 3:.1f} {HEIGHT - BOTTOM - 4}) rotate(-90)" '
                    f'font-size="9" fill="#999">{escape(text)}</text>'
                )


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    base: int  # of a logarithmic axis, 0: linear
    start: float
    end: float

    @classmethod
    def over(
        cls, values: Sequence[float], base: int, start: float, end: float, from_zero: bool = False
    ) -> Axis:
        low, high = min(values), max(values)
        if base:
            low, high = base ** math.floor(math.log(low, base)), base ** math.ceil(math.log(high, base))
        elif from_zero:
            low, high = 0.0, high * 1.08 or 1.0
        return cls(low, high if high > low else low + 1.0, base, start, end)

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return self.start + (self._scaled(value) - low) / (high - low) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log(value, self.base) if self.base else value

    def ticks(self) -> list[float]:
        if self.base:
            first, last = round(self._scaled(self.low)), math.floor(self._scaled(self.high) + 1e-9)
            return [float(self.base) ** power for power in range(first, last + 1)]
        rough = (self.high - self.low) / TICKS
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value in y.ticks():
        at = y.place(value)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:,.6g}</text>'
    for value in x.ticks():
        at = x.place(value)
        yield f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,.6g}</text>'


def _lines(drawn: Sequence[Series], x: Axis, y: Axis) -> Iterator[str]:
    for colour, series in zip(cycle(COLOURS), drawn, strict=False):
        path = " ".join(f"{x.place(px):.1f},{y.place(py):.1f}" for px, py in series.points)
        dash = ' stroke-dasharray="5 4"' if series.dashed else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
    names = "".join(
        f'<tspan dx="14" fill="{colour}">{escape(series.name)}</tspan>'
        for colour, series in zip(cycle(COLOURS), drawn, strict=False)
    )
    yield f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end">{names}</text>'


def throughput(results: Results) -> Chart:
    return _by_clients(results, "Answers a second", "answers/s", {"": "answers_per_s"})


def latency(results: Results) -> Chart:
    return _by_clients(results, "Latency of answers", "ms", {"p50": "p50_ms", "p99": "p99_ms"}, base_y=10)


def refusals(results: Results) -> Chart:
    return _by_clients(results, "Refusals", "calls", {"": "refused"})


def _by_clients(results: Results, title: str, unit: str, keys: Mapping[str, str], base_y: int = 0) -> Chart:
    """One line for each ladder and key."""
    series = [
        Series(
            f"{_mode(name)} {label}".strip(),
            [(rung["clients"], rung[key]) for rung in result["rungs"] if rung[key] is not None],
        )
        for name, result in results.items()
        if name.startswith("ladder")
        for label, key in keys.items()
    ]
    return Chart(f"{title} by TLS clients", "clients", unit, series, base_x=2, base_y=base_y)


def _mode(name: str) -> str:
    mode = name.partition("-")[2]
    return f"{mode} neighbour" if mode in ("idle", "busy") else mode or "no neighbour"


def footprint(results: Results) -> Chart:
    """The longest trace there is, with what may be taken."""
    traces = [each["results"]["memory"] for each in results.values() if "memory" in each["results"]]
    if not traces:
        raise ValueError("no run sampled its memory")
    trace = max(traces, key=lambda each: len(each["points"]))
    end = trace["points"][-1][0] if trace["points"] else 0.0
    plan = Series("plan", [(0.0, trace["plan_mib"]), (end, trace["plan_mib"])], dashed=True)
    measured = Series("measured", [(at, mib) for at, mib in trace["points"]])
    return Chart(
        "Memory over a run",
        "seconds",
        "MiB",
        [measured, plan],
        marks=[(at, text) for at, text in trace["marks"]],
    )


def burst(results: Results) -> Chart:
    series = [
        Series(f"{_mode(name)}: {what}", [(at, count) for at, count in points])
        for name, result in results.items()
        if name.startswith("burst")
        for what, points in result["results"]["cold"]["time_line"].items()
    ]
    return Chart("A burst, from connecting to the last answer", "seconds", "clients", series)


PICTURES: dict[str, Callable[[Results], Chart]] = {
    "ladder-throughput": throughput,
    "ladder-latency": latency,
    "ladder-refusals": refusals,
    "memory-under-load": footprint,
    "burst": burst,
}


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The result files of the ladder in `folder`, by their names: those of a card, where there are any, as a
    CPU's share no axis with them."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("benchmark") == "ladder":
            found[path.stem] = result
    on_card = {name: result for name, result in found.items() if result["hardware"]["cards"]}
    return on_card or found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "docs" / "pictures")
    given = parser.parse_args()
    results = load(given.results)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        try:
            (given.out / f"{name}.svg").write_text(draw(results).svg(), encoding="utf-8")
        except ValueError as error:
            print(f"not drawn: {name}: {error}")
        else:
            print(f"wrote {given.out / name}.svg")


if __name__ == "__main__":
    main()
