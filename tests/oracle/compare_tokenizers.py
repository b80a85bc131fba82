#!/usr/bin/env python3
"""Compare llamacli's tokenizer with llama.cpp's on a GGUF file's vocabulary.

    python tests/oracle/compare_tokenizers.py FILE [--count 2000] [--seed 0]
    python tests/oracle/compare_tokenizers.py --pre all [--count 2000] [--seed 0]
    python tests/oracle/compare_tokenizers.py --word-piece 8 --unigram 8 --best-scores 8 [--count 2000] [--seed 0]

Compares random texts and every single token. Needs llama-cpp-python, and llamacli with the family's plugin. FILE may be
any GGUF file; --pre NAME stands for a vocabulary of all pairs of bytes with that pre-tokenizer, which shows every
difference between word boundaries, --pre all for every pre-tokenizer in turn; --word-piece N, --unigram N and
--best-scores N for N random vocabularies of these schemes. Exits with 1 at the first difference. Two differences are
intended and ignored: llama.cpp adds a BOS or EOS even where the text spells one already, and it "cleans up" spaces of
some models' decoded text. Its character tables are those of Unicode 15.1: newer characters are not tested.
"""

import argparse
import ctypes
import os
import random
import re
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import llama_cpp

import gguf
from llamacli import load_tokenizer
from llamacli.gguf.tokens import BYTE_OF_CHAR
from llamacli.tokenizer import Tokenizer
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from character_map import character_map

_quiet = llama_cpp.llama_log_callback(lambda *_: None)


class Peer:
    """llama.cpp's tokenizer of one file."""

    def __init__(self, path: str):
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp refuses {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[:n])

    def decode(self, ids: list[int], unparse_special: bool) -> bytes:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        return self._text(
            lambda buffer, size: llama_cpp.llama_detokenize(
                self.vocab, tokens, len(ids), buffer, size, False, unparse_special
            )
        )

    def piece(self, token: int, special: bool) -> bytes:
        return self._text(
            lambda buffer, size: llama_cpp.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
        )

    def special_id(self, name: str) -> int | None:
        token = getattr(llama_cpp, f"llama_vocab_{name}")(self.vocab)
        return None if token < 0 else token

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)

    @staticmethod
    def _text(write: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> bytes:
        size = 64
        while (n := write(buffer := ctypes.create_string_buffer(size), size)) < 0:
            size = -n
        return buffer.raw[:n]


def random_texts(count: int, seed: float, tokens: list[str], specials: list[str]) -> Iterator[str]:
    """Random texts of letters, digits, white space, marks, emoji and tokens."""
    rng = random.Random(seed)
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    by_category: dict[str, list[str]] = {}
    for char in assigned:
        by_category.setdefault(unicodedata.category(char), []).append(char)
    categories = list(by_category.values())
    spaces = [c for c in assigned if c.isspace()] + list(" \t\n\r" * 20)
    words = re.findall(
        "[^ ]+",
        "the The THE quick's we'll I'M don't they'RE You've 'stand 'Tis 'llama é É ÉÉa aÉ café über straße ПРИВЕТ мир "
        "नमस्ते 東京 한국어 x1 3.14 1000000 12345 foo_bar a/b// C++ --- ... !?., ' '' 's 'S '\u017f \u212a \ufffd ▁ ▁▁ "
        "<0x0A> <0xE2> 😀 👍🏽 👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 1\ufe0f\u20e3 e\u0301 \u200d \ufeff \x00 \x7f "
        "\U000e0080 \ufffe",
    )
    snippets: list[Callable[[], str]] = [
        lambda: rng.choice(words),
        lambda: " " + rng.choice(words),
        lambda: "".join(rng.choices(spaces, k=rng.randint(1, 5))),
        lambda: rng.choice(" \n\t\r") * rng.randint(1, 20),
        lambda: "\r\n" * rng.randint(1, 3),
        lambda: "".join(rng.choices("0123456789", k=rng.randint(1, 12))),
        lambda: "".join(rng.choices("aAzZéÉßǅʰא", k=rng.randint(1, 8))),
        lambda: "".join(rng.choice(rng.choice(categories)) for _ in range(rng.randint(1, 4))),
        lambda: "".join(rng.choices(rng.choice(categories), k=rng.randint(1, 6))),
        lambda: rng.choice(tokens),
        lambda: rng.choice(tokens)[: rng.randint(1, 8)],
        lambda: rng.choice(specials),
        lambda: rng.choice(specials)[rng.randint(0, 2) : rng.randint(1, 30)],
        lambda: rng.choice("'!/-\"(){}[]<>|~^+=$#@") * rng.randint(1, 4),
    ]
    for _ in range(count):
        yield "".join(rng.choice(snippets)() for _ in range(rng.randint(1, rng.choice((3, 8, 30)))))


def cleaned_up(text: bytes) -> bytes:
    """Text after llama.cpp's clean_up_tokenization_spaces."""
    text = re.sub(rb" (?=[?!.,])", b"", text).replace(b" ' ", b"'")
    return re.sub(rb" (?='(?:s|m|re|ve))", b"", text)


def replaced(text: bytes) -> bytes:
    """Text with U+FFFD in place of invalid UTF-8."""
    return text.decode(errors="replace").encode()


def write_pairs(path: str, pre: str) -> None:
    """Write a byte-level BPE vocabulary of all bytes and byte pairs.

    Pairs are merged in random order.
    """
    pairs = [(left, right) for left in BYTE_OF_CHAR for right in BYTE_OF_CHAR]
    random.Random(0).shuffle(pairs)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*BYTE_OF_CHAR, *("".join(pair) for pair in pairs), "<s>", "</s>", "<|user|>"])
    control = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.USER_DEFINED]
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(BYTE_OF_CHAR) + len(pairs)) + control)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(len(BYTE_OF_CHAR) + len(pairs))
    writer.add_eos_token_id(len(BYTE_OF_CHAR) + len(pairs) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def random_pieces(rng: random.Random, count: int) -> list[str]:
    """Words of random texts and parts of them."""
    pieces: dict[str, None] = {}
    texts = random_texts(1 << 30, rng.random(), ["the"], ["<"])
    words = (word for text in texts for word in text.replace("\0", "").split())  # the peer cuts tokens at NUL
    while len(pieces) < count:
        word = next(words)
        start = rng.choice((0, 0, rng.randrange(len(word))))
        pieces[word[start : start + rng.choice((1, 1, 2, 3, 5, 20))]] = None
    return list(pieces)


def write_word_piece(path: str, seed: int) -> None:
    """Write a random WordPiece vocabulary with random options of its normalizer."""
    rng = random.Random(seed)
    pieces = random_pieces(rng, 3000)
    tokens = dict.fromkeys(rng.choice(("", "\u2581")) + rng.choice((piece, piece.lower())) for piece in pieces)
    tokens |= dict.fromkeys(f"{mark}{char}" for mark in ("", "\u2581") for char in "abcdefghijklmnopqrstuvwxyz .,")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = dict.fromkeys(text for text in tokens if text not in special)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*special, *tokens])
    unknown, control, normal = gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control, unknown, control, control, control] + [normal] * len(tokens))
    for i, name in enumerate(("padding", "unknown", "bos", "seperator", "mask")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    for name in ("lowercase", "strip_accents"):
        if rng.random() < 0.5:
            writer.add_bool(f"tokenizer.ggml.normalizer.{name}", rng.random() < 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_raw(path: str, model: str, pre: str) -> None:
    """Write a random vocabulary with merges of raw UTF-8."""
    rng = random.Random(0)
    words = [word.replace(" ", "\u2581") for word in random_pieces(rng, 1500)]
    words += ["\u2581" * n for n in range(2, 9)] + ["\n" * n for n in range(2, 9)] + ["\u2581the", "\u2581a"]
    chars = dict.fromkeys([*"\u2581\nabcdefghijklmnopqrstuvwxyz.,", *"".join(words)])
    merges = list(dict.fromkeys(f"{word[:i]} {word[i]}" for word in words for i in range(1, len(word))))
    rng.shuffle(merges)
    byte_tokens = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))
    tokens = {"<pad>": None, "<s>": None, "</s>": None, **byte_tokens, **chars}
    tokens |= dict.fromkeys(merge.replace(" ", "") for merge in merges)
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.BYTE] * 256
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


RAW = (("gemma4", "gemma4"), ("gpt2", "granite-embed-multi-311m"), ("gpt2", "sarvam-moe"), ("whitespace", "whitespace"))
"""Models and pre-tokenizers with merges of raw UTF-8."""


def write_unigram(path: str, seed: int) -> None:
    """Write a random Unigram vocabulary, a map of characters and options."""
    rng = random.Random(seed)
    special = {"<pad>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL, "<unk>": gguf.TokenType.UNKNOWN}
    types = dict.fromkeys([*"abcdefghijklmnopqrstuvwxyz.,", "\u2581"], gguf.TokenType.NORMAL)
    for piece in random_pieces(rng, 3000):
        kind = rng.choices((gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED), (300, 1, 3))[0]
        types.setdefault(rng.choice(("", "\u2581")) + piece, kind)
    types = {**special, **{text: kind for text, kind in types.items() if text not in special}}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([*types])
    writer.add_token_types([*types.values()])
    writer.add_token_scores([rng.choice((-1.0, -rng.random() * 12, -float(len(text)))) for text in types])
    for name in ("add_space_prefix", "remove_extra_whitespaces", "add_bos_token", "add_eos_token"):
        if rng.random() < 0.6 and name != "add_bos_token":
            writer.add_bool(f"tokenizer.ggml.{name}", rng.random() < 0.6)
    if rng.random() < 0.8:
        replacements = {f"{char}": unicodedata.normalize("NFKC", char) for char in map(chr, range(0xA0, 0x2500))}
        replacements = {key: text for key, text in replacements.items() if text != key}
        replacements |= {"\t": " ", "\n": " ", "\r": "", "\u3000": " ", "\ufdfa": "x" * 40, "ab": "B", "abc": "C"}
        writer.add_precompiled_charsmap(character_map(replacements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_best_scores(path: str, seed: int) -> None:
    """Write a random vocabulary of PLaMo 2's scheme."""
    rng = random.Random(seed)
    kinds = {"<|plamo:unk|>": gguf.TokenType.UNKNOWN}
    kinds |= dict.fromkeys((f"<|plamo:{name}|>" for name in ("bos", "eos", "pad")), gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys((f"<0x{byte:02X}>" for byte in range(256)), gguf.TokenType.BYTE)
    for piece in [*"abcdefghijklmnopqrstuvwxyz ., \n", *random_pieces(rng, 3000)]:
        kinds.setdefault(piece, gguf.TokenType.NORMAL)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("plamo2")
    writer.add_token_list([*kinds])
    writer.add_token_types([*kinds.values()])
    writer.add_token_scores([rng.choice((-1.0, -rng.random() * 12, -float(len(text)))) for text in kinds])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def drop_doubled(ids: list[int], ours: Tokenizer) -> list[int]:
    if ours.add_bos and ids[:2] == [ours.bos_id] * 2:
        ids = ids[1:]
    if (ours.add_eos and ids[-2:] == [ours.eos_id] * 2) or (ours.add_sep and ids[-2:] == [ours.sep_id] * 2):
        ids = ids[:-1]
    return ids


def compare(path: str, count: int, seed: int, decoding: bool = True) -> None:
    """Compare everything, or all but decoding; AssertionError at the first difference."""
    ours, peer = load_tokenizer(path), Peer(path)

    def same(what: str, mine: object, theirs: object) -> None:
        assert mine == theirs, f"{path}: {what}: llamacli {mine!r}, llama.cpp {theirs!r}"

    same("n_vocab", ours.n_vocab, llama_cpp.llama_vocab_n_tokens(peer.vocab))
    same("add_bos", ours.add_bos, llama_cpp.llama_vocab_get_add_bos(peer.vocab))
    same("add_eos", ours.add_eos, llama_cpp.llama_vocab_get_add_eos(peer.vocab))
    for name in ("bos", "eos", "eot", "pad", "sep", "mask"):
        same(name, getattr(ours, f"{name}_id"), peer.special_id(name))
    for token in range(ours.n_vocab):
        what = f"token {token} {ours.token_text(token)!r}"
        same(f"{what} is an end", token in ours.eog_ids, llama_cpp.llama_vocab_is_eog(peer.vocab, token))
        same(f"{what} is control", ours.is_control(token), llama_cpp.llama_vocab_is_control(peer.vocab, token))
        for special in (False, True) if decoding else ():
            same(f"piece of {what}", ours.piece_bytes(token, special), peer.piece(token, special))

    probe = ours.encode("a .", add_special=False)
    clean = cleaned_up if peer.decode(probe, False).endswith(b"a.") else lambda text: text
    tokens = [ours.token_text(token) for token in range(ours.n_vocab)]
    specials = [text for token, text in enumerate(tokens) if ours.is_control(token) or text.startswith("<")]
    n_tokens = 0
    for text in random_texts(count, seed, tokens, specials):
        for parse_special in (False, True):
            for add_special in (False, True):
                ids = ours.encode(text, add_special, parse_special)
                theirs = peer.encode(text, add_special, parse_special)
                if ids != theirs:
                    same(f"encode({text!r}, {add_special=}, {parse_special=})", ids, drop_doubled(theirs, ours))
                n_tokens += len(ids)
            ids = ours.encode(text, False, parse_special)
            stream = ours.stream()
            streamed = "".join([stream.feed(token) for token in ids] + [stream.flush()])
            same(f"stream of {ids}", streamed, ours.decode(ids))
            if decoding and ids[:1] != [ours.bos_id]:  # past BOS llama.cpp keeps the space put before text
                same(f"decode({ids})", clean(ours.decode(ids).encode()), replaced(peer.decode(ids, False)))
    peer.close()
    print(f"{path}: {count} texts, {n_tokens} tokens, {ours.n_vocab} pieces: no difference")


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--word-piece", type=int, default=0, metavar="N")
    parser.add_argument("--raw", action="store_true", help="compare vocabularies with merges of raw UTF-8")
    parser.add_argument("--unigram", type=int, default=0, metavar="N")
    parser.add_argument("--best-scores", type=int, default=0, metavar="N")
    parser.add_argument("--pre", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    llama_cpp.llama_log_set(_quiet, None)
    if options.file:
        compare(options.file, options.count, options.seed)
    pre = list(PRE_TOKENIZERS) if options.pre == ["all"] else options.pre
    made: list[tuple[str, Callable[[str], None]]] = [(name, partial(write_pairs, pre=name)) for name in pre]
    made += [(f"word-piece-{i}", partial(write_word_piece, seed=i)) for i in range(options.word_piece)]
    made += [(f"raw-{name}", partial(write_raw, model=model, pre=name)) for model, name in RAW if options.raw]
    made += [(f"unigram-{i}", partial(write_unigram, seed=i)) for i in range(options.unigram)]
    made += [(f"best-scores-{i}", partial(write_best_scores, seed=i)) for i in range(options.best_scores)]
    for name, write in made:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"{name}.gguf")
            write(path)
            compare(path, options.count, options.seed, decoding=name != "raw-whitespace")  # the peer reads it as bytes


if __name__ == "__main__":
    try:
        main()
    except AssertionError as difference:
        sys.exit(str(difference))
