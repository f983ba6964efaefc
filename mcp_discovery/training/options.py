"""The options of a training run, and what they default to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcp_discovery.training.batches import BatchSize
from mcp_discovery.training.data import DataError
from mcp_discovery.training.groups import Mixture

# Many real servers weigh more than a few, or than synthetic sets; a source is a set, or `set:tools` for
# requests made up from its tools. Sources not named here weigh 1.
DEFAULT_FACTORS: Mapping[str, float] = {
    "toucan_servers:tools": 2.6,
    "metatool:tools": 0.5,
    "sealtools": 0.55,
    "sealtools:tools": 0.6,
    "acebench_en": 0.7,
    "acebench_en:tools": 0.6,
    "apibank": 0.5,
    "arcade": 0.6,
}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    model: Path  # GGUF file or safetensors folder of the base
    start: Path | None = None  # adapter to go on from, whose rank and alpha hold then
    steps: int = 2400
    rank: int = 24
    alpha: float = 48.0
    learning_rate: float = 5e-4
    warmup: float = 0.03  # of the run
    last_rate: float = 0.0  # of the learning rate, at the end
    weight_decay: float = 0.1
    rank_dropout: float = 0.1  # chance that a step leaves out a row of A with its column of B
    clip: float = 1.0
    probability_weight: float = 0.5
    smoothing: float = 0.02  # of the labels of the probability loss
    match_weight: float = 0.5
    temperature: float = 0.03
    size: BatchSize = field(default_factory=BatchSize)
    mixture: Mixture = field(default_factory=Mixture)
    factors: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_FACTORS))
    seed: int = 0
    mine_at: tuple[float, ...] = (0.1, 0.35, 0.65)  # of the run
    keep_at: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the run: snapshots beside its end
    hold_out: Mapping[str, float] = field(default_factory=dict)  # set -> share of it kept out of training
    choose: str | None = None  # snapshot or range such as 60%-80% to write where nothing is held out
    held_queries: int = 150  # of a held-out set, for each snapshot
    dev: tuple[Path, ...] = ()  # sets to report on at the end; they choose nothing
    idle: Path | None = None  # requests that no tool of the named dev sets serves
    dev_queries: int = 400  # of a dev set, for the adapter chosen; a quarter of them for the others
    also_written: int = 2  # next best adapters written beside the chosen one
    device: str = "auto"
    workers: int = 0  # processes that prepare batches
    compiled: bool = False
    checkpoint: Path | None = None  # resumed from where it exists
    save_every_s: float = 120.0  # between writings of the checkpoint
    log_every: int = 20

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DataError("a training run needs at least 1 step")
        if self.size.candidates < 2 or self.size.groups < 1 or self.size.pairs < 0:
            raise DataError(
                "a step needs at least 1 group of at least 2 candidates, and no fewer than 0 pairs"
            )
        if not 0.0 <= self.rank_dropout < 1.0:
            raise DataError("rank_dropout is a chance from 0 to below 1")
        for name, share in self.hold_out.items():
            if not 0.0 < share < 1.0:
                raise DataError(f"hold out a share between 0 and 1 of {name}, not {share:g}")


def changed(options: TrainOptions, settings: Sequence[str]) -> TrainOptions:
    """`options` with settings such as `learning_rate=1e-4`, `groups=4`, `keep_at=0.5,0.8` or
    `factors.arcade=2`. Raises DataError where there is no such option or the value is none of its kind."""
    for setting in settings:
        name, _, text = setting.partition("=")
        inner = next((each for each in ("size", "mixture") if hasattr(getattr(options, each), name)), None)
        if inner is not None:
            holder = getattr(options, inner)
            value = _parsed(setting, getattr(holder, name), text)
            options = replace(options, **{inner: replace(holder, **{name: value})})
            continue
        name, _, key = name.partition(".")
        current = getattr(options, name, None)
        if not isinstance(current, int | float | tuple | Mapping) or bool(key) != isinstance(
            current, Mapping
        ):
            raise DataError(f"there is no training option to set by {setting!r}")
        if isinstance(current, Mapping):
            value = {**current, key: _parsed(setting, 0.0, text)}
        else:
            value = _parsed(setting, current, text)
        options = replace(options, **{name: value})
    return options


def _parsed(setting: str, current: Any, text: str) -> Any:
    """`text` as a value of the kind of `current`."""
    try:
        if isinstance(current, bool):
            return {"true": True, "false": False}[text]
        if isinstance(current, tuple):
            return tuple(float(part) for part in text.split(",") if part)
        return type(current)(text)
    except (KeyError, ValueError):
        kinds = {bool: "true or false", tuple: "numbers with commas between", int: "a whole number"}
        raise DataError(f"{setting!r} needs {kinds.get(type(current), 'a number')} after =") from None
