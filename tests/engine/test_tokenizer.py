"""The tokenizer against a plain byte-level BPE, and what text can never become."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.gguf_file import GGUFFile
from engine.tokenizer import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "<empty_output>")
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SAMPLES = [
    "Find the cheapest flight from Berlin to Lisbon and email it to 2 people: bob@example.org",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0x1F]}\t# it's we'll they've I'd\r\n\r\n",
    "Wie wird das Wetter übermorgen in Nürnberg? Größe, Straße, Fußgänger",
    "東京の天気を教えてください。二〇二四年１２月 ½ ² Ⅳ ①",
    "Какая погода завтра в Москве? Отправь сообщение Ивану.",
    "ما هو الطقس غدا في القاهرة؟ ١٢٣",
    "मौसम कैसा रहेगा? १२३ नमस्ते",
    "ราคาทองวันนี้เท่าไหร่ 오늘 날씨 어때? שלום עולם Γειά σου",
    "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 e\u0301 \u00a0\u2003\u200b\ufeff end",
    "   leading, trailing and      inner   \n\n\n  \t\t ",
    "<|im_start|>system\nyou are<|im_end|> <|endoftext|><file_sep> <|im_start",
    "CamelCase snake_case kebab-case dotted.name a/b?c=d&e=%20 $100,000.00",
    "",
    " ",
    "\n",
]


def byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte in a GPT-2 vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


class PlainBPE:
    """Merges the pair of lowest rank until none is left. Digits stand alone."""

    def __init__(self, path: Path) -> None:
        metadata = GGUFFile(path).metadata
        self.ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): n for n, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.bytes = byte_characters()

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        words = [word for piece in pieces for word in WORDS.findall(piece)]
        return [index for word in words for index in self._word(word)]

    def _word(self, word: str) -> list[int]:
        parts = [self.bytes[byte] for byte in word.encode() if self.bytes[byte] in self.ids]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="session")
def plain(model_path: Path) -> PlainBPE:
    return PlainBPE(model_path)


def mixtures(count: int) -> list[str]:
    """Pieces of the samples, cut anywhere and joined: every script beside every other."""
    rng = random.Random(4)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 6)):
            sample = rng.choice(SAMPLES)
            cut = rng.randint(0, len(sample))
            parts.append(sample[cut : cut + rng.randint(1, 25)])
        texts.append(rng.choice(["", " ", "\n"]).join(parts))
    return texts


def test_agrees_with_plain_bpe_in_many_scripts(tokenizer: Tokenizer, plain: PlainBPE) -> None:
    for text in SAMPLES + mixtures(600):
        assert tokenizer.encode(text) == plain.encode(text), text


@given(text=st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_agrees_on_any_text(tokenizer: Tokenizer, plain: PlainBPE, text: str) -> None:
    assert tokenizer.encode(text) == plain.encode(text)


@pytest.mark.parametrize("text", SAMPLES)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(parts=st.lists(st.one_of(st.sampled_from(SPECIALS), st.text(max_size=5)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_text_never_becomes_a_special_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    specials = {tokenizer.special(token) for token in SPECIALS}
    assert specials.isdisjoint(tokenizer.encode("".join(parts)))


def test_specials_by_name(tokenizer: Tokenizer) -> None:
    assert [tokenizer.special(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    with pytest.raises(ModelError, match="no special token 'yes'"):
        tokenizer.special("yes")


def test_half_a_surrogate_pair_and_half_a_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) in ("é", "\ufffd")
    assert tokenizer.decode([tokenizer.special("<|im_start|>"), *tokenizer.encode("hi")]) == "hi"


def write_tokenizer_json(folder: Path, path: Path) -> None:
    """The file's tokenizer as publishers of safetensors folders store it."""
    metadata = GGUFFile(path).metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, (t, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != 1
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    stored = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<|endoftext|>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def test_a_folder_gives_the_same_tokens(tokenizer: Tokenizer, model_path: Path, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path, model_path)
    other = Tokenizer.from_folder(tmp_path)
    for text in SAMPLES + mixtures(100):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(other.encode(text)) == text
    assert other.special("<|im_end|>") == 2


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"added_tokens": [], "model": {"vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"added_tokens": [], "model": {"vocab": {"a": 0}, "merges": ["a"]}}',
        '{"added_tokens": [], "model": {"vocab": {"a": "b"}, "merges": []}}',
        '{"added_tokens": [], "pre_tokenizer": {"type": "x"}, "model": {"vocab": {"a": 0}, "merges": []}}',
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: No such file"):
        Tokenizer.from_folder(tmp_path)
