"""Which adapter a model is served with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import ConfigError, ModelError
from mcp_discovery import adapters, model_store
from mcp_discovery.discovery.calibration import Calibration
from mcp_discovery.discovery.prompts import VERSION

BASE = "ab" * 32


def adapter(path: Path, **metadata: str) -> Path:
    known = {"base_sha256": BASE, "base": "tiny", "rank": "2", "alpha": "4", "prompt_version": VERSION}
    known |= metadata
    save_file({"layers.0.o.lora_a": np.zeros((2, 4), np.float32)}, path, metadata=known)
    return path


def test_the_shipped_adapter_is_found_by_the_digest_of_the_default_model() -> None:
    found = adapters.resolve("auto", model_store.DEFAULT.file_sha256)
    assert found is not None
    assert found.path in adapters.shipped()
    assert found.path.stat().st_size <= 15 << 20
    assert adapters.resolve("none", model_store.DEFAULT.file_sha256) is None


def test_a_model_that_none_was_shipped_for_has_none() -> None:
    assert adapters.resolve("auto", BASE) is None


def test_a_file_of_ones_own_is_taken_with_the_calibration_beside_it(tmp_path: Path) -> None:
    path = adapter(tmp_path / "own.safetensors")
    found = adapters.resolve(str(path), BASE)
    assert found is not None
    assert (found.rank, found.calibration) == (2, Calibration())
    values = {"slope": 0.5, "offset": -3, "doubt_below": 7}
    (tmp_path / "own.json").write_text(json.dumps({"calibration": values}))
    found = adapters.resolve(str(path), BASE)
    assert found is not None
    assert found.calibration == Calibration(0.5, -3.0, doubt_below=7.0)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"base_sha256": "cd" * 32, "base": "other"}, "trained for other (cdcdcdcdcdcd), this model is abab"),
        ({"prompt_version": "0"}, f"trained for prompt version 0, this is version {VERSION}"),
        ({"rank": "two"}, "does not state its rank"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, str], reason: str
) -> None:
    path = adapter(tmp_path / "odd.safetensors", **metadata)
    with pytest.raises(ModelError) as refused:
        adapters.resolve(str(path), BASE)
    assert reason in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_missing_or_damaged_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        adapters.resolve(str(tmp_path / "none.safetensors"), BASE)
    (tmp_path / "bad.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        adapters.resolve(str(tmp_path / "bad.safetensors"), BASE)
    path = adapter(tmp_path / "own.safetensors")
    (tmp_path / "own.json").write_text("{}")
    with pytest.raises(ModelError, match="calibration"):
        adapters.resolve(str(path), BASE)
