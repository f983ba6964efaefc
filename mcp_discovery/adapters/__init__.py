"""Adapters: those shipped here, and which one a model is served with.

An adapter is a safetensors file whose metadata names its base model's digest (`base_sha256`) and the
version of the prompts that it was trained for (`prompt_version`). A file NAME.json beside
NAME.safetensors holds its calibration: how score and cosine become the published probability, and the
default threshold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import ConfigError, ModelError
from engine.model_files import digest
from mcp_discovery.discovery import prompts
from mcp_discovery.discovery.calibration import Calibration

FOLDER = Path(__file__).parent
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that fits its model and the prompts of this version."""

    path: Path
    sha256: str
    rank: int
    calibration: Calibration


def resolve(setting: str, base_sha256: str) -> AdapterFile | None:
    """The adapter that `setting` means for the model of this digest; None for no adapter.

    `auto` is the shipped one of this model and these prompts, if there is one; `none` is none;
    anything else is a path. Raises ConfigError where the file is not there, ModelError where it is no
    adapter or was trained for another model or other prompts.
    """
    if setting == NONE:
        return None
    if setting == AUTO:
        fitting = (path for path in shipped() if _misfit(_metadata(path), base_sha256) is None)
        path = next(fitting, None)
        return None if path is None else _described(path)
    path = Path(setting).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"the adapter {path} does not exist; set engine.adapter to a file, {AUTO!r} or {NONE!r}"
        )
    if misfit := _misfit(_metadata(path), base_sha256):
        raise ModelError(f"adapter {path} {misfit}; choose another adapter or leave engine.adapter out")
    return _described(path)


def shipped() -> list[Path]:
    """The adapters of this package, by name."""
    return sorted(FOLDER.glob("*.safetensors"))


def _metadata(path: Path) -> Mapping[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {path} cannot be read: {error}") from error


def _misfit(metadata: Mapping[str, str], base_sha256: str) -> str | None:
    """Why an adapter does not fit, as the rest of a sentence; None where it does."""
    base = metadata.get("base_sha256", "")
    if base != base_sha256:
        name = metadata.get("base") or "a base that it does not name"
        return f"was trained for {name} ({base[:12] or 'no digest'}), this model is {base_sha256[:12]}"
    version = metadata.get("prompt_version", "")
    if version != prompts.VERSION:
        return f"was trained for prompt version {version or 'unknown'}, this is version {prompts.VERSION}"
    return None


def _described(path: Path) -> AdapterFile:
    try:
        rank = int(_metadata(path)["rank"])
    except (KeyError, ValueError):
        raise ModelError(f"adapter {path} does not state its rank as a number") from None
    return AdapterFile(path, digest(path), rank, calibration(path))


def calibration(adapter: Path) -> Calibration:
    """As the file beside the adapter says, or the defaults. Raises ModelError where it is damaged."""
    path = adapter.with_suffix(".json")
    if not path.is_file():
        return Calibration()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["calibration"]
        return Calibration(**{key: float(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"the calibration {path} cannot be read: {error!r}") from error
