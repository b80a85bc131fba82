"""Construction of a tokenizer from GGUF metadata, and what plugins register."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError, TokenizerError
from llamacli.gguf import Metadata
from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer.best_scores import BestScores
from llamacli.tokenizer.byte_level import ByteLevelBPE
from llamacli.tokenizer.longest_match import LongestMatch
from llamacli.tokenizer.merging import RankMerging, ScoreMerging, WhitespaceMerging
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS, RAW_UTF8, PreTokenizer
from llamacli.tokenizer.tokenizer import Scheme, Tokenizer
from llamacli.tokenizer.unigram import CharacterMap, Unigram
from llamacli.tokenizer.vocabulary import (
    MERGES,
    SCORES,
    TOKEN_TYPE,
    TOKENS,
    Vocabulary,
    numbers,
    read_vocabulary,
    special_ids,
    strings,
)
from llamacli.tokenizer.word_piece import BertNormalizer, WordPiece

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_ADD_BOS = "tokenizer.ggml.add_bos_token"
_ADD_EOS = "tokenizer.ggml.add_eos_token"
_ADD_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
_REMOVE_EXTRA_WHITESPACES = "tokenizer.ggml.remove_extra_whitespaces"
_LOWERCASE = "tokenizer.ggml.normalizer.lowercase"
_STRIP_ACCENTS = "tokenizer.ggml.normalizer.strip_accents"

_log = logging.getLogger(__name__)
_Entry = TypeVar("_Entry")


def tokenizer_from_metadata(
    metadata: Mapping[str, Any],
    strips_after: Callable[[str], bool] = lambda _: False,
    strips_before: Callable[[str], bool] = lambda _: False,
) -> Tokenizer:
    """Make the tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe.

    `strips_after` and `strips_before` are predicates on a special token's text: encoding drops the white space after or
    before such a token, as Hugging Face's `rstrip` and `lstrip` do; no GGUF key stores them. TokenizerError for an
    unknown scheme, ModelFormatError when a key is missing, of the wrong type or length, or out of range.
    """
    metadata = metadata if isinstance(metadata, Metadata) else Metadata(metadata)
    make = _look_up(metadata, _MODEL, metadata.get_str(_MODEL, "none"), TOKENIZER_MODELS)
    made = make(metadata)
    strips_mask = metadata.get_str(_PRE, "") in _STRIPS_BEFORE_MASK

    def before(special: str) -> bool:
        return (strips_mask and special == "<mask>") or strips_before(special)

    return Tokenizer(made.vocabulary, made.scheme, made.add_bos, made.add_eos, strips_after, before, made.add_sep)


def _look_up(metadata: Metadata, key: str, value: str, table: Mapping[str, _Entry]) -> _Entry:
    if value not in table:
        raise TokenizerError(
            f"{metadata.source}: {key} = {value!r} is not supported (supported: {', '.join(sorted(table))})"
        )
    return table[value]


@attrs.frozen
class TokenizerParts:
    """Vocabulary, scheme, and the special tokens that are added to texts."""

    vocabulary: Vocabulary
    scheme: Scheme
    add_bos: bool
    add_eos: bool
    add_sep: bool = False


@attrs.frozen
class NamedPreTokenizer:
    """Pre-tokenizer of byte-level BPE, with its name in `tokenizer.ggml.pre`."""

    name: str
    scheme: PreTokenizer


@attrs.frozen
class TokenizerModel:
    """Tokenizer with its name in `tokenizer.ggml.model`.

    `make(metadata)` returns the vocabulary, the scheme that encodes and decodes with it, and which special tokens are
    added to texts. It raises ModelFormatError for keys that are missing or wrong.
    """

    name: str
    make: Callable[[Metadata], TokenizerParts]


def _score_merging(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0})
    scores = _scores(metadata, len(vocabulary.tokens))
    scheme = ScoreMerging(vocabulary, scores, metadata.get_bool(_ADD_SPACE_PREFIX, True))
    return TokenizerParts(vocabulary, scheme, metadata.get_bool(_ADD_BOS, True), metadata.get_bool(_ADD_EOS, False))


def _rank_merging(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {})
    scheme = RankMerging(vocabulary, strings(metadata, MERGES))
    # BOS is fixed, as in llama.cpp.
    return TokenizerParts(vocabulary, scheme, True, metadata.get_bool(_ADD_EOS, False))


def _word_piece(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {"bos": 101, "unknown": 100, "separator": 102, "padding": 0, "mask": 103})
    lowercase = metadata.get_bool(_LOWERCASE, True)
    normalizer = BertNormalizer(lowercase, metadata.get_bool(_STRIP_ACCENTS, lowercase))
    scheme = WordPiece(vocabulary, normalizer, metadata.get_bool(_ADD_SPACE_PREFIX, False))
    return TokenizerParts(vocabulary, scheme, add_bos=True, add_eos=False, add_sep=True)  # fixed, as in llama.cpp


def _unigram(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {"eos": 1, "unknown": 2, "padding": 0})
    n_vocab = len(vocabulary.tokens)
    types = numbers(metadata, TOKEN_TYPE, n_vocab, "iu")
    scheme = Unigram(
        vocabulary,
        np.full(n_vocab, TokenKind.NORMAL) if types is None else types,
        _scores(metadata, n_vocab),
        CharacterMap.from_bytes(metadata),
        metadata.get_bool(_ADD_SPACE_PREFIX, False),
        metadata.get_bool(_REMOVE_EXTRA_WHITESPACES, False),
    )
    return TokenizerParts(vocabulary, scheme, metadata.get_bool(_ADD_BOS, False), metadata.get_bool(_ADD_EOS, True))


def _best_scores(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0, "padding": 3})
    n_vocab = len(vocabulary.tokens)
    types = numbers(metadata, TOKEN_TYPE, n_vocab, "iu")
    if types is None:
        raise ModelFormatError(f"{metadata.source}: metadata key {TOKEN_TYPE!r} is missing: it tells bytes from texts")
    scheme = BestScores(vocabulary, types, _scores(metadata, n_vocab))
    return TokenizerParts(vocabulary, scheme, add_bos=False, add_eos=False)  # fixed, as in llama.cpp


def _scores(metadata: Metadata, n_vocab: int) -> npt.NDArray[np.float32]:
    scores = numbers(metadata, SCORES, n_vocab, "iuf")
    return np.zeros(n_vocab, np.float32) if scores is None else scores.astype(np.float32)


def _byte_level(metadata: Metadata) -> TokenizerParts:
    pre = metadata.get_str(_PRE, "")
    if not pre:
        _log.warning("%s: %s is missing, using 'default': tokens may be wrong", metadata.source, _PRE)
    vocabulary = read_vocabulary(metadata, {})
    add_eos = metadata.get_bool(_ADD_EOS, False)
    if pre in RAW_UTF8:
        whole_newlines, add_bos = RAW_UTF8[pre]
        scheme = RankMerging(vocabulary, strings(metadata, MERGES), whole_newlines)
        return TokenizerParts(vocabulary, scheme, add_bos or metadata.get_bool(_ADD_BOS, False), add_eos)
    pre_tokenizer = _look_up(metadata, _PRE, pre or "default", PRE_TOKENIZERS)
    add_bos = metadata.get_bool(_ADD_BOS, pre_tokenizer.add_bos)
    merges = [] if pre == "kimi-k2" and MERGES not in metadata else strings(metadata, MERGES)
    return TokenizerParts(vocabulary, ByteLevelBPE(vocabulary, merges, pre_tokenizer), add_bos, add_eos)


def _whitespace(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {})
    scheme = WhitespaceMerging(vocabulary, strings(metadata, MERGES), metadata.get_bool(_LOWERCASE, False))
    return TokenizerParts(vocabulary, scheme, metadata.get_bool(_ADD_BOS, False), metadata.get_bool(_ADD_EOS, False))


def _longest_match(metadata: Metadata) -> TokenizerParts:
    vocabulary = read_vocabulary(metadata, {})
    return TokenizerParts(vocabulary, LongestMatch(vocabulary), add_bos=False, add_eos=False)  # fixed, as in llama.cpp


class _IdsOnly:
    """Scheme for files without a vocabulary; `source` names the file."""

    add_space_prefix = False

    def __init__(self, source: str):
        self._source = source

    def encode(self, text: str, continues: bool = False) -> list[int]:
        raise TokenizerError(f"{self._source}: the file has no vocabulary: use token ids instead of text {text[:40]!r}")

    def decode(self, text: str) -> bytes:
        return text.encode()


class _HexNames(Sequence[str]):
    """Hexadecimal ids as token texts, as llama.cpp shows them."""

    def __init__(self, n_vocab: int):
        self._n_vocab = n_vocab

    def __len__(self) -> int:
        return self._n_vocab

    def __getitem__(self, index: Any) -> Any:
        found = range(self._n_vocab)[index]
        return [f"{token:x}" for token in found] if isinstance(found, range) else f"{found:x}"


def _ids_only(metadata: Metadata) -> TokenizerParts:
    if TOKENS in metadata:
        n_vocab = len(strings(metadata, TOKENS))
    else:
        n_vocab = metadata.get_int(f"{metadata.get_str('general.architecture')}.vocab_size", minimum=1)
    special = special_ids(metadata, n_vocab, {})
    ends = frozenset(special[name] for name in ("eos", "eot", "eom") if name in special)
    vocabulary = Vocabulary(_HexNames(n_vocab), {}, special, ends)
    scheme = _IdsOnly(metadata.source)
    return TokenizerParts(vocabulary, scheme, metadata.get_bool(_ADD_BOS, False), metadata.get_bool(_ADD_EOS, False))


_STRIPS_BEFORE_MASK = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
"""Values of tokenizer.ggml.pre with which white space before <mask> is dropped."""

TOKENIZER_MODELS: dict[str, Callable[[Metadata], TokenizerParts]] = {
    "llama": _score_merging, "gpt2": _byte_level, "gemma4": _rank_merging, "bert": _word_piece, "t5": _unigram,
    "whitespace": _whitespace, "rwkv": _longest_match, "plamo2": _best_scores,
    "test": _ids_only, "none": _ids_only, "no_vocab": _ids_only,
}  # fmt: skip
"""Functions that make a tokenizer, by `tokenizer.ggml.model`; plugins add more."""
