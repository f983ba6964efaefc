"""Computes the canary's known answers: float32, dense attention, one request at a time.

    python -m engine.canary_answers MODEL [ADAPTER]

writes the answers of the model (with the adapter) to `data/canary.json`, in place of older ones.
Nothing of pages, batches or schedules takes part, so that the answers judge them.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.canary import OUTPUT_TOKENS, Answers, Questions, read_data, read_questions
from engine.model import Model
from engine.model_files import digest
from engine.request import Tokens
from engine.weights import load_weights, read_adapter

MARGIN = 0.5  # by how much the best logit must lead, so that bfloat16 finds the same token


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole sequence. q [T, heads, head_dim]; k, v [T, kv_heads, head_dim]."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def last_state(model: Model, tokens: Tokens) -> Tensor:
    """Final-normed hidden state [1, hidden] after `tokens`."""
    count = len(tokens)
    hidden = model.hidden_states(
        torch.tensor(tokens), torch.arange(count), attend, rows=torch.tensor([count - 1])
    )
    return model.final_norm(hidden)


def answer(model: Model, questions: Questions) -> Answers:
    """What the model says to each question."""
    continuations = tuple(_continue(model, prompt) for prompt in questions.prompts)
    score = questions.score
    pair = torch.tensor([score.positive, score.negative])
    probabilities = []
    for prefix in score.prefixes:
        positive, negative = model.logits(last_state(model, prefix + score.suffix), pair)[0].double()
        probabilities.append(torch.sigmoid(positive - negative).item())
    texts = [functional.normalize(last_state(model, text).double(), dim=-1) for text in questions.texts]
    return Answers(continuations, tuple(probabilities), (texts[0] * texts[1]).sum().item())


def _continue(model: Model, prompt: Tokens) -> Tokens:
    """The greedy continuation, as far as each token leads by `MARGIN`."""
    tokens = prompt
    while len(tokens) < len(prompt) + OUTPUT_TOKENS:
        best = model.logits(last_state(model, tokens))[0].topk(2)
        if (best.values[0] - best.values[1]).item() < MARGIN:
            break
        tokens = (*tokens, int(best.indices[0]))
    return tokens[len(prompt) :]


def main(arguments: list[str]) -> None:
    model_path, adapter_path = Path(arguments[0]), Path(arguments[1]) if arguments[1:] else None
    model_sha256 = digest(model_path)
    adapter = read_adapter(adapter_path, model_sha256) if adapter_path else None
    shape, weights = load_weights(model_path, torch.float32, torch.device("cpu"), adapter=adapter)
    data = read_data()
    with torch.inference_mode():
        answers = answer(Model(shape, weights), read_questions(data))
    adapter_sha256 = digest(adapter_path) if adapter_path else ""
    _store(data, answers, model_sha256, adapter_sha256)


def _store(data: dict[str, Any], answers: Answers, model_sha256: str, adapter_sha256: str) -> None:
    key = (model_sha256, adapter_sha256)
    kept = [each for each in data["answers"] if (each["model_sha256"], each["adapter_sha256"]) != key]
    kept.append(
        {
            "model_sha256": model_sha256,
            "adapter_sha256": adapter_sha256,
            "continuations": answers.continuations,
            "probabilities": [float(f"{value:.6g}") for value in answers.probabilities],
            "cosine": round(answers.cosine, 6),
        }
    )
    data["answers"] = kept
    target = Path(str(resources.files("engine").joinpath("data/canary.json")))
    target.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
