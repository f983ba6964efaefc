"""The shape of a model and the settings of an engine: frozen, validated, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ConfigError, ModelError

Device = Literal["auto", "cuda", "cpu"]
KVDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3"]
ComputeDtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-family decoder: pre-norm, rotary positions, grouped-query attention, SwiGLU."""

    architecture: str  # "llama" or "qwen3"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool  # Qwen3: RMS norm of each head's query and key before rotation

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "vocabulary",
            "context",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"model shape: {name} must be at least 1, it is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model shape: {self.heads} heads cannot share {self.kv_heads} key-value heads evenly"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """From the `config.json` of a safetensors folder (the keys of the published models)."""
        architecture = str(config.get("model_type", ""))
        if architecture not in ("llama", "qwen3"):
            raise ModelError(f"model type {architecture!r} is not supported; llama and qwen3 are")
        parameters = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or parameters
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise ModelError(f"rope scaling {scaling} is not supported")
        heads = int(config["num_attention_heads"])
        return cls(
            architecture=architecture,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", heads)),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            rope_theta=float(config.get("rope_theta") or parameters.get("rope_theta") or 10_000.0),
            norm_eps=float(config["rms_norm_eps"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "qwen3",
        )

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """2 (keys and values) x layers x kv_heads x head_dim x element size."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Sizes are tokens, pages, rows or MiB, as the names say."""

    device: Device = "auto"
    allowance_mib: int = 2740
    serving_mib: int = 0  # CPU: of the allowance, for what serving callers takes after the load
    dtype: ComputeDtype = "auto"  # of weights and activations
    kv_dtype: KVDtype = "auto"  # of pages; auto: as the activations
    page_tokens: int = 16
    step_tokens: int | None = None  # most new tokens a step; None: by device
    step_rows: int = 512  # most sequences a step
    max_queue: int = 4096  # most requests waiting
    max_queued_tokens: int = 4_000_000  # most prefill tokens waiting
    max_pages: int | None = None  # fewer pages than the allowance gives, for tests and small sites
    threads: int | None = None  # CPU: torch threads; None: torch's own choice

    def __post_init__(self) -> None:
        limits = {
            "allowance_mib": (1, 1 << 20),
            "serving_mib": (0, 1 << 20),
            "page_tokens": (1, 256),
            "step_rows": (1, 65_536),
            "max_queue": (0, 1 << 24),
            "max_queued_tokens": (1, 1 << 40),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"engine.{name} must be from {low} to {high}, it is {getattr(self, name)}")
        for name in ("step_tokens", "max_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, it is {value}")
        # Far more threads than cores end the process inside torch.
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError(f"engine.threads must be from 1 to 1024, it is {self.threads}")
