"""Text to token ids and back: byte-level BPE from a GGUF file or a `tokenizer.json`.

Special tokens (`<|im_start|>` and the like) are taken out of the vocabulary that `encode` works
with, so no text whatever can become one: they are only to be had by name, through `special`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError
from engine.gguf_file import GGUFFile

_NORMAL_TOKEN = 1  # token_type of a GGUF vocabulary entry that text may become
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """One vocabulary. Safe to use from several threads."""

    def __init__(self, bpe: tokenizers.Tokenizer, specials: Mapping[str, int]) -> None:
        self._bpe = bpe
        self._specials = dict(specials)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """From the vocabulary inside a GGUF file. Raises ModelError where it holds none that is known."""
        metadata = GGUFFile(path).metadata
        if metadata.get("tokenizer.ggml.model") != "gpt2":
            raise ModelError(f"{path} holds no byte-level BPE tokenizer")
        tokens, merges, types = (
            metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges", "token_type")
        )
        if not (isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, list)):
            raise ModelError(f"{path} lacks a part of its tokenizer: tokens, merges or token types")
        if len(types) != len(tokens):
            raise ModelError(f"{path} is damaged: {len(tokens)} tokens but {len(types)} token types")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        specials = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind != _NORMAL_TOKEN
        }
        pairs = [tuple(str(merge).split(" ", 1)) for merge in merges]
        bpe = tokenizers.Tokenizer(_bpe(path, vocabulary, pairs, specials, {}))
        _split_like(path, bpe, str(metadata.get("tokenizer.ggml.pre", "")))
        bpe.decoder = decoders.ByteLevel()
        return cls(bpe, specials)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `tokenizer.json`. Raises ModelError where it is missing, damaged or not byte-level BPE."""
        path = folder / "tokenizer.json"
        try:
            stored = json.loads(path.read_bytes())
            specials = {str(token["content"]): int(token["id"]) for token in stored["added_tokens"]}
            options = {key: stored["model"].get(key) for key in ("ignore_merges",)}
            merges = [m.split(" ", 1) if isinstance(m, str) else m for m in stored["model"]["merges"]]
            model = _bpe(path, stored["model"]["vocab"], map(tuple, merges), specials, options)
            # The model is replaced by ours; the rest of the file is kept but for what adds tokens.
            empty = {"type": "BPE", "vocab": {}, "merges": []}
            frame = {**stored, "model": empty, "added_tokens": [], "post_processor": None}
            bpe = tokenizers.Tokenizer.from_str(json.dumps(frame))
        except OSError as error:
            raise ModelError(f"tokenizer {path} cannot be read: {error.strerror or error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"tokenizer {path} is damaged or not a byte-level BPE: {error}") from error
        except Exception as error:  # tokenizers raises the bare class where it cannot read its part
            if type(error) is not Exception:
                raise
            raise ModelError(f"tokenizer {path} is damaged: {error}") from error
        bpe.model = model
        return cls(bpe, specials)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none of them special. Bytes that the vocabulary lacks are left out."""
        # JSON may carry half a surrogate pair, which has no UTF-8 form: it becomes a question mark.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return self._bpe.encode(clean, add_special_tokens=False).ids

    def special(self, token: str) -> int:
        """The id of a special token. Raises ModelError where the vocabulary has no such token."""
        if token not in self._specials:
            raise ModelError(f"the tokenizer has no special token {token!r}")
        return self._specials[token]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Special tokens are left out; a part of a character becomes U+FFFD."""
        return self._bpe.decode(list(ids), skip_special_tokens=False)


def _bpe(
    path: Path,
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, ...]],
    specials: Mapping[str, int],
    options: Mapping[str, Any],
) -> models.BPE:
    """The BPE model without special tokens, nor merges that lead to or from one."""
    usable = {token: index for token, index in vocabulary.items() if token not in specials}
    kept = []
    for pair in merges:
        if len(pair) != 2:
            raise ModelError(
                f"tokenizer of {path} is damaged: {' '.join(pair)!r} is not a merge of two tokens"
            )
        if specials.keys().isdisjoint((*pair, "".join(pair))):
            if not usable.keys() >= {*pair, "".join(pair)}:
                raise ModelError(f"tokenizer of {path} is damaged: it merges {' '.join(pair)!r}, not a token")
            kept.append((pair[0], pair[1]))
    return models.BPE(vocab=usable, merges=kept, **options)


def _split_like(path: Path, bpe: tokenizers.Tokenizer, name: str) -> None:
    """How text is split before merging, by the name that the GGUF file gives it."""
    if name == "smollm":
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name == "qwen2":
        bpe.normalizer = normalizers.NFC()
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise ModelError(f"{path} splits text like {name!r}; smollm and qwen2 are supported")
