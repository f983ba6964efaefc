"""What settings mean for discovery: which adapter, and a `Discovery` over a catalogue.

Imports neither the MCP SDK nor a web framework, so that an evaluation needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.client import EngineClient
from engine.config import Device
from engine.errors import ConfigError
from engine.tokenizer import Tokenizer
from mcp_discovery import adapters, model_store
from mcp_discovery.adapters import AdapterFile
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.listing import Listing
from mcp_discovery.discovery.prompts import VERSION, Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings, Trained
from mcp_discovery.discovery.vectors import VectorCache

CANDIDATES = 32
CPU_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """What a site has chosen of `[discovery]`; None leaves it to the model and the device."""

    candidates: int | None = None
    min_score: float | None = None
    limit: int = 5
    selector: Literal["score", "generate"] = "score"


@dataclass(frozen=True, slots=True)
class DiscoveryModel:
    """A model and the adapter that it is served with."""

    name: str
    path: Path
    sha256: str
    adapter: AdapterFile | None

    @classmethod
    def of(cls, model: str | None, adapter: str = adapters.AUTO) -> DiscoveryModel:
        """Raises ModelError and ConfigError where a file is missing or the adapter does not fit."""
        card = model_store.describe(model_store.locate(model))
        return cls(card.name, card.path, card.sha256, adapters.resolve(adapter, card.sha256))

    @property
    def adapter_path(self) -> Path | None:
        return None if self.adapter is None else self.adapter.path

    def discovery(
        self,
        client: EngineClient,
        catalogue: Catalogue,
        choices: Choices,
        *,
        device: Device,
        page_tokens: int,
        vectors: Path | None = None,
    ) -> Discovery:
        """Discovery over `catalogue` by the engine behind `client`, which runs this model. `vectors` is the
        folder where tools' vectors are kept; None: in the user's cache.

        Raises ConfigError where a model with an adapter shall write.
        """
        writes = choices.selector == "generate"
        if writes and self.adapter is not None:
            raise ConfigError(
                'discovery.selector "generate" needs a chat model as it is: set engine.adapter to "none"'
            )
        settings = DiscoverySettings(
            candidates=choices.candidates or usual_candidates(runs_on_cpu(device)),
            min_score=choices.min_score,
            limit=choices.limit,
        )
        read = Tokenizer.from_folder if self.path.is_dir() else Tokenizer.from_gguf
        tokenizer = read(self.path)
        return Discovery(
            client,
            Prompts(tokenizer, page_tokens),
            catalogue,
            settings,
            model=self.name,
            trained=self._trained(vectors),
            listing=Listing(tokenizer) if writes else None,
        )

    def _trained(self, vectors: Path | None) -> Trained | None:
        if self.adapter is None:
            return None
        return Trained(self.adapter.calibration, vector_cache(self.sha256, self.adapter.sha256, vectors))


def usual_candidates(on_cpu: bool) -> int:
    """As many as the device scores in good time."""
    return CPU_CANDIDATES if on_cpu else CANDIDATES


def runs_on_cpu(device: Device) -> bool:
    if device != "auto":
        return device == "cpu"
    import torch  # late: only a process that is to have an engine need load it

    return not torch.cuda.is_available()


def vector_cache(model_sha256: str, adapter_sha256: str, folder: Path | None = None) -> VectorCache:
    """The file of the tools' vectors in `folder`; None: beside the models in the user's cache."""
    folder = folder or model_store.cache_folder().parent / "vectors"
    return VectorCache.of(folder, model_sha256, adapter_sha256, VERSION)
