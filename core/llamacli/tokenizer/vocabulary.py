"""Vocabulary of a GGUF file: texts, types, special and end-of-generation ids."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError, TokenizerError
from llamacli.gguf import Metadata, StringArray
from llamacli.gguf.tokens import TokenKind

TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"
SCORES = "tokenizer.ggml.scores"
TOKEN_TYPE = "tokenizer.ggml.token_type"
SUPPRESS_TOKENS = "tokenizer.ggml.suppress_tokens"
SPACE = "▁"
"""A space in the tokens of most vocabularies."""


@attrs.frozen(eq=False)
class Vocabulary:
    """Token texts by id, and special tokens.

    `tokens`: the texts as stored in the file. `kinds`: of the tokens that are not NORMAL. `special`: ids by the names
    in their metadata keys ("bos", "eos", "unknown", ...), only those that exist. `eog_ids`: the ids that end
    generation. `suppressed`: ids that must never be generated.
    """

    tokens: Sequence[str]
    kinds: Mapping[int, TokenKind]
    special: Mapping[str, int]
    eog_ids: frozenset[int]
    suppressed: tuple[int, ...] = ()

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each text, of equal ones the last, as in llama.cpp."""
        return dict(zip(self.tokens, range(len(self.tokens)), strict=True))

    def kind(self, token: int) -> TokenKind:
        """Return the kind of a token."""
        return self.kinds.get(token, TokenKind.NORMAL)


class VocabularyScheme:
    """Base of the core's schemes, see `llamacli.tokenizer.tokenizer.Scheme`.

    Without a space before a text, and with U+2581 for spaces in tokens, unless a scheme says otherwise.
    """

    add_space_prefix = False

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""
        return text.replace(SPACE, " ").encode()

    def _unknown(self, text: str) -> int:
        unknown = self._vocabulary.special.get("unknown")
        if unknown is None:
            raise TokenizerError(f"{TOKENS} has neither tokens for {text[:40]!r} nor an unknown token")
        return unknown

    def _byte_ids(self, otherwise: int) -> list[int]:
        """Ids of the tokens <0x00> to <0xFF>, `otherwise` for those missing."""
        texts = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = ids_of(self._vocabulary.tokens, texts)
        return [ids.get(text, otherwise) for text in texts]


# Special tokens without a metadata key are found by text; the first text in the vocabulary counts.
# Texts and their roles: llama.cpp, llama-vocab.cpp.
_TEXTS = {
    name: texts.split()
    for name, texts in {
        **dict.fromkeys(("bos", "eos", "unknown", "padding", "separator", "mask"), ""),
        "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
        "<｜end▁of▁sentence｜> <end_of_utterance>",
        "eom": "<|eom_id|>",
        "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
        "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
        "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
        "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
        "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
        "fim_sep": "<|file_sep|>",
    }.items()
}
_OTHER_NAMES = {"separator": "seperator", "fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_NO_TOKEN = (None, -1, 0xFFFFFFFF)

# Tokens that end generation in addition to those of metadata keys.
_END_TEXTS = (
    *_TEXTS["eot"], *_TEXTS["eom"], "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>",
    "<turn|>", "<|tool_response>", "[e~[",
)  # fmt: skip
_VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def read_vocabulary(metadata: Metadata, default_ids: Mapping[str, int]) -> Vocabulary:
    """Read the vocabulary; `default_ids` are the special ids without a key.

    ModelFormatError when the token list or the token types are missing, too short or of the wrong type, or when a
    special id is out of range. Types and end-of-generation ids are corrected as llama.cpp does.
    """
    tokens = strings(metadata, TOKENS)
    ids = ids_of(tokens, {*_END_TEXTS, *_VISIBLE_TEXTS}.union(*_TEXTS.values()))
    kinds = _kinds(metadata, len(tokens))
    special = special_ids(metadata, len(tokens), default_ids)
    for name, texts in _TEXTS.items():
        found = [ids[text] for text in texts if text in ids]
        if name not in special and found:
            special[name] = found[0]
            kinds[found[0]] = TokenKind.CONTROL
    return Vocabulary(tokens, kinds, special, _ends(ids, kinds, special), _suppressed(metadata, len(tokens)))


def special_ids(metadata: Metadata, n_vocab: int, default_ids: Mapping[str, int]) -> dict[str, int]:
    """Return special ids of metadata keys, with defaults; ModelFormatError out of range."""
    special = {name: token for name, token in default_ids.items() if token < n_vocab}
    for name in _TEXTS:
        for key in (f"tokenizer.ggml.{name}_token_id", f"tokenizer.ggml.{_OTHER_NAMES.get(name, name)}_token_id"):
            if metadata.get_int(key, None) not in _NO_TOKEN:
                special[name] = metadata.get_int(key, minimum=0, maximum=n_vocab - 1)
    return special


def ids_of(tokens: Sequence[str], texts: Iterable[str]) -> dict[str, int]:
    """Ids of the texts that are tokens, sooner than by `Vocabulary.ids`."""
    if isinstance(tokens, StringArray):
        return tokens.last_places(texts)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    return {text: ids[text] for text in texts if text in ids}


def strings(metadata: Metadata, key: str) -> Sequence[str]:
    """Return the string array under `key`; ModelFormatError if missing or another type."""
    value = metadata.get(key)
    if value is None:
        raise ModelFormatError(f"{metadata.source}: metadata key {key!r} is missing")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ModelFormatError(f"{metadata.source}: metadata key {key!r} is not an array of strings")
    return value


def numbers(metadata: Metadata, key: str, n_vocab: int, dtype_kinds: str) -> npt.NDArray[Any] | None:
    """Return the numeric array under `key`, one per token, or None.

    ModelFormatError when it is shorter than the vocabulary or its dtype.kind is not one of `dtype_kinds`.
    """
    if key not in metadata:
        return None
    values = np.asarray(metadata[key])
    if values.ndim != 1 or values.dtype.kind not in dtype_kinds:
        raise ModelFormatError(f"{metadata.source}: metadata key {key!r} is not a numeric array with a value per token")
    if len(values) < n_vocab:
        raise ModelFormatError(f"{metadata.source}: metadata key {key!r} has {len(values)} values for {n_vocab} tokens")
    return values[:n_vocab]


def _kinds(metadata: Metadata, n_vocab: int) -> dict[int, TokenKind]:
    types = numbers(metadata, TOKEN_TYPE, n_vocab, "iu")
    if types is None:
        return {}
    unusual = np.flatnonzero(types != TokenKind.NORMAL)
    known = set(TokenKind)
    return {
        token: TokenKind(kind) if kind in known else TokenKind.UNDEFINED
        for token, kind in zip(unusual.tolist(), types[unusual].tolist(), strict=True)
    }


def _suppressed(metadata: Metadata, n_vocab: int) -> tuple[int, ...]:
    """Return the ids under SUPPRESS_TOKENS that are in range, as llama.cpp does."""
    values = np.asarray(metadata.get(SUPPRESS_TOKENS, np.empty(0, np.int32)))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ModelFormatError(f"{metadata.source}: metadata key {SUPPRESS_TOKENS!r} is not an array of token ids")
    return tuple(values[(values >= 0) & (values < n_vocab)].tolist())


def _ends(ids: Mapping[str, int], kinds: dict[int, TokenKind], special: Mapping[str, int]) -> frozenset[int]:
    by_text = {text: ids[text] for text in _END_TEXTS if text in ids}
    kinds.update(dict.fromkeys(by_text.values(), TokenKind.CONTROL))
    kinds.update({ids[text]: TokenKind.USER_DEFINED for text in _VISIBLE_TEXTS if text in ids})
    by_key = {special[name] for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if name in special}
    ends = by_key | set(by_text.values())

    def has(*texts: str) -> bool:
        return any(ids.get(text) in ends for text in texts)

    # If other tokens end a turn, <|end|> ends a message within it.
    if has("<|end|>") and has("<|call|>", "<|calls|>") and has("<|return|>", "<|flush|>"):
        ends.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    # If <|tool_response> ends a turn, </s> is an HTML tag.
    if has("</s>") and has("<|tool_response>"):
        ends.discard(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.NORMAL
    return frozenset(ends)
