"""Text to token ids and back, as llama.cpp does both; but decoding gives back all spaces, where it "cleans up" some."""

import codecs
import re
from collections.abc import Callable, Container, Iterable
from typing import Protocol

from llamacli.errors import InvalidRequestError
from llamacli.tokenizer.vocabulary import TokenKind, Vocabulary

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_C_SPACE = re.compile(r"[ \t\n\v\f\r]*")
_HIDDEN = (TokenKind.CONTROL, TokenKind.UNKNOWN)


class Scheme(Protocol):
    """How plain text becomes ids, and a plain token's text bytes."""

    @property
    def add_space_prefix(self) -> bool:
        """Whether a space belongs before a run of text, which decoding takes away."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a run of text that holds no special tokens, its space before it included."""

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text stands for."""


class Tokenizer:
    """A model's tokenizer.

    Attributes: `n_vocab`; the ids `bos_id`, `eos_id`, `eot_id`, `eom_id`, `unk_id`, `pad_id`, each None where the
    model has none; `eog_ids`, all ids after which generation ends; `suppressed`, ids that must not be generated;
    `add_bos` and `add_eos`, whether encoding adds these tokens when it adds special ones; `special_ids`, the tokens
    that are found in text before it is encoded, be it only where they are asked for, the longest first.

    Methods that take an id raise InvalidRequestError when it is not in the vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheme: Scheme,
        add_bos: bool = False,
        add_eos: bool = False,
        strips_after: Callable[[str], bool] = lambda _: False,
    ):
        special = vocabulary.special
        self.bos_id, self.eos_id = special.get("bos"), special.get("eos")
        self.eot_id, self.eom_id = special.get("eot"), special.get("eom")
        self.unk_id, self.pad_id = special.get("unknown"), special.get("padding")
        self._bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        self._eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        self.add_bos, self.add_eos = bool(self._bos), bool(self._eos)
        self.n_vocab = len(vocabulary.tokens)
        self.eog_ids, self.suppressed = vocabulary.eog_ids, vocabulary.suppressed
        self._vocabulary, self._scheme = vocabulary, scheme
        kinds = {*_HIDDEN, TokenKind.USER_DEFINED}
        texts = {token: vocabulary.tokens[token] for token, kind in sorted(vocabulary.kinds.items()) if kind in kinds}
        longest_first = sorted(filter(texts.get, texts), key=lambda token: -len(texts[token].encode()))
        self._special = [(texts[token], token, strips_after(texts[token])) for token in longest_first]
        self._user_defined = [entry for entry in self._special if vocabulary.kind(entry[1]) not in _HIDDEN]
        self.special_ids = tuple(longest_first)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text.

        With `add_special` BOS and EOS are added if the model expects them, unless the text spells them there already.
        With `parse_special` control tokens spelled in the text become their ids, otherwise they stay text. Lone
        surrogates are read as U+FFFD. TokenizerError when the vocabulary cannot express the text.
        """
        parts = self._partition(text, self._special if parse_special else self._user_defined)
        ids = self._encode(parts)
        if not add_special:
            return ids
        bos = self._bos if parts[:1] != self._bos else []
        eos = self._eos if parts[-1:] != self._eos else []
        return [*bos, *ids, *eos]

    def split(self, text: str, tokens: Container[int]) -> list[int | str]:
        """Return a text cut where it spells one of these special tokens: their ids, and the runs of text between."""
        return self._partition(text, [entry for entry in self._special if entry[1] in tokens])

    def encode_run(self, text: str, barred: Container[int] = (), continues: bool = False) -> list[int]:
        """Return the ids of a run of text in which nothing is special but user-defined tokens that are not `barred`.

        A run that `continues` the text before it gets no space of its own.
        """
        return self._encode(self._partition(text, [e for e in self._user_defined if e[1] not in barred]), continues)

    def decode(self, ids: Iterable[int], unparse_special: bool = False) -> str:
        """Return the text of tokens, without the space that encoding put before it; broken UTF-8 becomes U+FFFD.

        Control and unknown tokens are left out, or spelled with `unparse_special`.
        """
        stream = self.stream(unparse_special=unparse_special)
        return "".join([*map(stream.feed, ids), stream.flush()])

    def stream(self, prefix: Iterable[int] = (), unparse_special: bool = False) -> "StreamDecoder":
        """Return a decoder for tokens that come one by one, after those in `prefix`."""
        stream = StreamDecoder(self, unparse_special)
        for token in prefix:
            stream.feed(token)
        return stream

    def piece(self, token: int, unparse_special: bool = False) -> str:
        """Return the text of one token by itself, with its leading space; broken UTF-8 becomes U+FFFD."""
        return self.piece_bytes(token, unparse_special).decode(errors="replace")

    def piece_bytes(self, token: int, unparse_special: bool = False) -> bytes:
        """Return the bytes of one token; none for control and unknown tokens, except with `unparse_special`."""
        text, kind = self.token_text(token), self._vocabulary.kind(token)
        if kind is TokenKind.USER_DEFINED or (kind in _HIDDEN and unparse_special):
            return text.encode()
        if kind is TokenKind.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind in (TokenKind.NORMAL, TokenKind.BYTE):
            return self._scheme.decode(text)
        return b""

    def token_text(self, token: int) -> str:
        """Return a token as it is written in the vocabulary."""
        if not 0 <= token < self.n_vocab:
            raise InvalidRequestError(f"token id {token} is not in the vocabulary of {self.n_vocab} tokens")
        return self._vocabulary.tokens[token]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is written so in the vocabulary."""
        return self._vocabulary.ids.get(text)

    def kind(self, token: int) -> TokenKind:
        """Return what sort of token this is."""
        return self._vocabulary.kind(token)

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model and is no text."""
        return self._vocabulary.kind(token) is TokenKind.CONTROL

    def _encode(self, parts: Iterable[int | str], continues: bool = False) -> list[int]:
        """Return the ids of parted text; where the model expects it, a run of text gets a space before it."""
        ids = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = " " if self._scheme.add_space_prefix and not continues else ""
                ids += self._scheme.encode(prefix + part)
            continues = False
        return ids

    def _partition(self, text: str, specials: Iterable[tuple[str, int, bool]]) -> list[int | str]:
        """Cut text at special tokens: ids, and what stands between them.

        Longer special tokens are found first, each from left to right, whatever shorter ones that breaks up.
        """
        text = _LONE_SURROGATE.sub("\ufffd", text)
        taken = bytearray(len(text))
        found = []
        for special, token, strips in specials:
            start = text.find(special)
            while start >= 0:
                stop = start + len(special)
                clash = taken.find(1, start, stop)
                if clash < 0:
                    if strips and (spaces := _C_SPACE.match(text, stop)):
                        next_taken = taken.find(1, stop)
                        stop = min(spaces.end(), next_taken if next_taken >= 0 else len(text))
                    taken[start:stop] = b"\1" * (stop - start)
                    found.append((start, stop, token))
                    start = text.find(special, stop)
                else:
                    free = taken.find(0, clash)
                    start = text.find(special, free) if free >= 0 else -1
        parts: list[int | str] = []
        position = 0
        for start, stop, token in sorted(found):
            parts += [text[position:start], token] if position < start else [token]
            position = stop
        return [*parts, text[position:]] if position < len(text) else parts


class StreamDecoder:
    """Decodes tokens one by one: what feed() and flush() return adds up to what Tokenizer.decode() returns."""

    def __init__(self, tokenizer: Tokenizer, unparse_special: bool):
        self._tokenizer, self._unparse_special = tokenizer, unparse_special
        self._strip = tokenizer._scheme.add_space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that the next token completes; bytes of an incomplete character are held back."""
        piece = self._tokenizer.piece_bytes(token, self._unparse_special)
        if self._strip and self._tokenizer.piece_bytes(token):
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return what was held back, U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
