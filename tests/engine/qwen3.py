"""A random model of Qwen3's shape as published files, questions to it, and transformers' answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.agreement import agreement
from engine import Engine, Generate, Generated, Score, Scored
from engine.config import ModelShape

WHOLE = ModelShape(
    architecture="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
    vocabulary=151_936, context=40_960, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
TINY = ModelShape(
    architecture="qwen3", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96,
    vocabulary=503, context=2048, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
LOGIT_STD = 2.0


def make_folder(folder: Path, shape: ModelShape, seed: int = 0) -> Path:
    """Writes `config.json` and `model.safetensors` as they are published, in bfloat16."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": shape.head_dim, "hidden_act": "silu", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "max_position_embeddings": shape.context,
        "model_type": "qwen3", "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads, "rms_norm_eps": shape.norm_eps, "rope_scaling": None,
        "rope_theta": shape.rope_theta, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_sliding_window": False, "vocab_size": shape.vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Matrices keep the size of what they multiply, the residual stream stays near 1 through all layers,
    logits have a standard deviation of `LOGIT_STD`. Gains are not near 1: one left out would show. The
    last one's have either sign: with tied embeddings a token would else be its own likeliest successor."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn((rows, columns), generator=generator)
        return drawn.mul_(scale / math.sqrt(columns)).bfloat16()

    def gain(size: int, mean: float = 1.0, spread: float = 0.3) -> Tensor:
        return (mean + spread * torch.randn(size, generator=generator)).bfloat16()

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    onto_residual = 1 / math.sqrt(2 * shape.layers)
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, LOGIT_STD),
        "model.norm.weight": gain(shape.hidden, mean=0.0, spread=1.0),
    }
    for layer in range(shape.layers):
        parts = {
            "input_layernorm": gain(shape.hidden),
            "self_attn.q_proj": matrix(queries, shape.hidden),
            "self_attn.k_proj": matrix(keys, shape.hidden),
            "self_attn.v_proj": matrix(keys, shape.hidden),
            "self_attn.q_norm": gain(shape.head_dim, mean=1.5),
            "self_attn.k_norm": gain(shape.head_dim, mean=1.5),
            "self_attn.o_proj": matrix(shape.hidden, queries, onto_residual),
            "post_attention_layernorm": gain(shape.hidden),
            "mlp.gate_proj": matrix(shape.intermediate, shape.hidden),
            "mlp.up_proj": matrix(shape.intermediate, shape.hidden),
            "mlp.down_proj": matrix(shape.hidden, shape.intermediate, onto_residual),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return tensors


class Reference:
    """transformers' own Qwen3 over the same files: float32 on the CPU, one sequence at a time, no cache."""

    def __init__(self, folder: Path) -> None:
        loaded: Any = Qwen3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = loaded.eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """float32 [last, vocabulary]: after each of the last tokens."""
        given = torch.tensor([list(tokens)])
        logits: Tensor = self._model(given, logits_to_keep=last, use_cache=False).logits[0]
        return logits

    def probabilities(self, score: Score) -> list[float]:
        found = []
        for prefix in score.prefixes:
            logits = self.logits((*prefix, *score.suffix), 1)[0].double()
            found.append(torch.sigmoid(logits[score.positive] - logits[score.negative]).item())
        return found

    def shortfalls(self, request: Generate, tokens: Sequence[int]) -> list[float]:
        """Of each token that was written after the prompt and those before it: how far its logit is below
        the highest, 0 where it is the highest."""
        logits = self.logits((*request.tokens, *tokens[:-1]), len(tokens))
        own = logits.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
        shortfalls: list[float] = (logits.max(dim=1).values - own).tolist()
        return shortfalls


@dataclass(frozen=True, slots=True)
class Questions:
    scores: list[Score]
    continuations: list[Generate]

    @classmethod
    def random(cls, shape: ModelShape, prompts: Sequence[int], output: int, seed: int = 1) -> Questions:
        """Three groups of eight rows over a dozen prefixes, so that some are shared, and a continuation of
        `output` tokens for each prompt length. Lengths of prefixes lie around whole pages of 16."""
        source = random.Random(seed)

        def text(length: int) -> tuple[int, ...]:
            return tuple(source.randrange(shape.vocabulary) for _ in range(length))

        prefixes = [text(length) for length in (1, 15, 16, 17, 31, 32, 48, 63, 64, 66, 80, 97)]
        scores = [
            Score(tuple(source.sample(prefixes, 8)), text(suffix), *source.sample(range(shape.vocabulary), 2))
            for suffix in (2, 30, 38)
        ]
        return cls(scores, [Generate(text(length), max_tokens=output) for length in prompts])


@dataclass(frozen=True, slots=True)
class Answers:
    probabilities: list[tuple[float, ...]]
    continuations: list[tuple[int, ...]]


def ask(engine: Engine, questions: Questions) -> Answers:
    """All at once, and the scores once more, when their prefixes are resident: both times' probabilities."""
    first = engine.probe([*questions.scores, *questions.continuations])
    again = engine.probe([*questions.scores])
    groups = len(questions.scores)
    scored = [outcome for outcome in (*first[:groups], *again) if isinstance(outcome, Scored)]
    written = [outcome for outcome in first[groups:] if isinstance(outcome, Generated)]
    assert (len(scored), len(written)) == (2 * groups, len(questions.continuations)), (first, again)
    return Answers([each.probabilities for each in scored], [each.tokens for each in written])


def check(questions: Questions, answers: Answers, reference: Reference, margin: float) -> None:
    """Probabilities within `benchmarks.agreement.TOLERANCE` and in the reference's order where they are
    further apart; each token the reference's own choice, or one whose logit is within `margin` of it."""
    wanted = [reference.probabilities(score) for score in questions.scores]
    found = agreement(answers.probabilities, wanted * 2)
    spread = [probability for group in wanted for probability in group]
    print(found)
    assert max(spread) - min(spread) > 0.5, "these probabilities tell nothing"
    assert (found["rows_beyond_tolerance"], found["pairs_swapped"]) == (0, 0), found
    written = [token for tokens in answers.continuations for token in tokens]
    assert len(set(written)) > len(written) // 2, "continuations that repeat themselves tell nothing"
    for request, tokens in zip(questions.continuations, answers.continuations, strict=True):
        assert len(tokens) == request.max_tokens
        shortfalls = reference.shortfalls(request, tokens)
        print(f"{len(request.tokens)} in: {sum(each > 0 for each in shortfalls)} of {len(tokens)} differ")
        assert max(shortfalls) <= margin, shortfalls
