"""Encoding and decoding of text, as llama.cpp does it.

Unlike llama.cpp's, decoding keeps all spaces: there is no `clean_up_tokenization_spaces`.
"""

import codecs
import operator
import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol

from llamacli.errors import InvalidRequestError, TokenizerError, expect_type
from llamacli.gguf import StringArray
from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer.vocabulary import Vocabulary
from llamacli.util.numbers import is_integer

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_C_SPACES = " \t\n\v\f\r"
_C_SPACE = re.compile(r"[ \t\n\v\f\r]*")
_HIDDEN = (TokenKind.CONTROL, TokenKind.UNKNOWN)

_UTF8_STATE = 3
"""Bytes that a UTF-8 decoder can hold back: all but the last of the longest character."""


class Scheme(Protocol):
    """Encoding of plain text, and decoding of normal tokens."""

    @property
    def add_space_prefix(self) -> bool:
        """True if a space is put before each run of text."""

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens.

        A prefix space is put before it if it is expected and the text does not continue other text.
        """

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""


_SNIPPET = "\n\n--- snippet ---\n\n"
"""Text between files where the vocabulary has no token for that."""


class Tokenizer:
    """Tokenizer of a model.

    Attributes: `n_vocab`; the ids `bos_id`, `eos_id`, `eot_id`, `eom_id`, `unk_id`, `pad_id`, `sep_id`, `mask_id`, each
    None where the model has none; `eog_ids`, the ids that end generation; `suppressed`, ids that must not be generated;
    `add_bos`, `add_eos` and `add_sep`, true if encoding adds these tokens with `add_special`; `special_ids`, the
    special and user-defined tokens that encoding can find in text, the longest first; `infill_ids`, the tokens before
    the text, before its suffix and before what is generated (fill-in-the-middle, FIM), or None.

    Methods that take an id raise InvalidRequestError when it is not in the vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheme: Scheme,
        add_bos: bool = False,
        add_eos: bool = False,
        strips_after: Callable[[str], bool] = lambda _: False,
        strips_before: Callable[[str], bool] = lambda _: False,
        add_sep: bool = False,
    ):
        special = vocabulary.special
        self.bos_id, self.eos_id = special.get("bos"), special.get("eos")
        self.eot_id, self.eom_id = special.get("eot"), special.get("eom")
        self.unk_id, self.pad_id = special.get("unknown"), special.get("padding")
        self.sep_id, self.mask_id = special.get("separator"), special.get("mask")
        infill = [special[name] for name in ("fim_pre", "fim_suf", "fim_mid") if name in special]
        self.infill_ids = (infill[0], infill[1], infill[2]) if len(infill) == 3 else None
        self._repository, self._file = special.get("fim_rep"), special.get("fim_sep")
        self._bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        sep = [self.sep_id] if add_sep and self.sep_id is not None else []
        self._end = eos or sep
        self.add_bos, self.add_eos, self.add_sep = bool(self._bos), bool(eos), bool(sep)
        self.n_vocab = len(vocabulary.tokens)
        self.eog_ids, self.suppressed = vocabulary.eog_ids, vocabulary.suppressed
        self._vocabulary, self._scheme = vocabulary, scheme
        tokens = vocabulary.tokens
        self._spans = tokens.spans() if isinstance(tokens, StringArray) else None
        kinds = {*_HIDDEN, TokenKind.USER_DEFINED}
        texts = {token: vocabulary.tokens[token] for token, kind in sorted(vocabulary.kinds.items()) if kind in kinds}
        longest_first = sorted(filter(texts.get, texts), key=lambda token: -len(texts[token].encode()))
        self._special = [
            (texts[token], token, strips_before(texts[token]), strips_after(texts[token])) for token in longest_first
        ]
        self._user_defined = [entry for entry in self._special if vocabulary.kind(entry[1]) not in _HIDDEN]
        self.special_ids = tuple(longest_first)

    def __repr__(self) -> str:
        return f"<Tokenizer, {self.n_vocab} tokens, {len(self.special_ids)} of them special>"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text.

        With `add_special` BOS and EOS, in BERT's models [CLS] and [SEP], are added if the model expects them, unless
        the text spells them there already.
        With `parse_special` control tokens spelled in the text become their ids, otherwise they stay text. Lone
        surrogates are read as U+FFFD. TokenizerError when the vocabulary cannot express the text.
        """
        parts = self._partition(text, self._special if parse_special else self._user_defined)
        ids = self._encode(parts)
        if not add_special:
            return ids
        bos = self._bos if parts[:1] != self._bos else []
        end = self._end if parts[-1:] != self._end else []
        return [*bos, *ids, *end]

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """True if every id means the same token in both.

        Masks, which draft heads put in the place of tokens to predict, do not count.
        """
        ours, theirs = self._vocabulary, other._vocabulary
        special, other_special = ({**known.special, "mask": None} for known in (ours, theirs))
        return ours is theirs or (
            list(ours.tokens) == list(theirs.tokens)
            and (ours.kinds, special, ours.eog_ids) == (theirs.kinds, other_special, theirs.eog_ids)
        )

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Return a prompt's ids: BOS if expected, never EOS; otherwise as `encode`."""
        ids = self.encode(text, parse_special=parse_special)
        return ids[:-1] if self.add_eos else ids

    def encode_infill(
        self,
        prefix: str | Sequence[int],
        suffix: str,
        files: Sequence[tuple[str, str]] | None = None,
        room: int | None = None,
    ) -> list[int]:
        """Return the ids of a prompt for fill-in-the-middle (FIM).

        Prefix first, as llama.cpp's default. `files` are names and texts of other files, which are written before, as
        by llama-server; of these the last tokens are kept that `room` tokens in all allow. TokenizerError when the
        vocabulary has no tokens for this.
        """
        if self.infill_ids is None:
            raise TokenizerError("this model's vocabulary has no tokens for fill-in-the-middle")
        before, after, middle = self.infill_ids
        texts = [
            self.encode_run(text, self.infill_ids, continues=True) if isinstance(text, str) else text
            for text in (prefix, suffix)
        ]
        ids = [*self._bos, before, *texts[0], after, *texts[1], middle]
        if files is None:
            return ids
        others = [] if self._repository is None else [self._repository, *self.encode_run("myproject\n", continues=True)]
        for name, text in files:
            begin = f"{name}\n" if self._file is not None else _SNIPPET
            others += [*([] if self._file is None else [self._file]), *self.encode_run(begin, continues=True)]
            others += self.encode_run(text, continues=True)
        if self._file is not None:
            others += [self._file, *self.encode_run("filename\n", continues=True)]
        n = len(others) if room is None else max(0, room - len(ids))
        return [*others[max(0, len(others) - n) :], *ids]

    def split(self, text: str, tokens: Container[int]) -> list[int | str]:
        """Split text at these special tokens: ids, and the text between."""
        return self._partition(text, [entry for entry in self._special if entry[1] in tokens])

    def encode_run(self, text: str, excluded: Container[int] = (), continues: bool = False) -> list[int]:
        """Return the ids of text in which only user-defined tokens are special.

        User-defined tokens that are `excluded` stay text. Text that `continues` gets no prefix space.
        """
        return self._encode(self._partition(text, [e for e in self._user_defined if e[1] not in excluded]), continues)

    def decode(self, ids: Iterable[int], unparse_special: bool = False) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD.

        The space that encoding put first is removed, also after BOS; llama.cpp keeps it after any other special token.
        Control and unknown tokens are left out, or spelled with `unparse_special`.
        """
        expect_type(ids, Iterable, "ids", "a sequence of token ids")
        tokens = [*ids]
        pieces = {token: self.piece_bytes(token, unparse_special) for token in dict.fromkeys(tokens)}
        stream = self.stream(unparse_special=unparse_special)
        start = [stream.feed(token) for token in tokens[:2]]  # the first, and one after BOS, lose a space
        return "".join([*start, stream.finish(b"".join(map(pieces.__getitem__, tokens[2:])))])

    def stream(self, prefix: Sequence[int] = (), unparse_special: bool = False) -> "StreamDecoder":
        """Return an incremental decoder that continues after the tokens in `prefix`."""
        # They change two things in a decoder: whether there was text before, and the bytes it holds back.
        n_bytes, start = 0, len(prefix)
        while start and n_bytes < _UTF8_STATE:
            start -= 1
            n_bytes += len(self.piece_bytes(prefix[start], unparse_special))
        if start:
            begins = next(token for token in prefix if self.piece_bytes(token, unparse_special))
            prefix = [begins, *prefix[start:]]
        stream = StreamDecoder(self, unparse_special)
        for token in prefix:
            stream.feed(token)
        return stream

    def piece(self, token: int, unparse_special: bool = False) -> str:
        """Return a token's text with leading space; invalid UTF-8 becomes U+FFFD."""
        return self.piece_bytes(token, unparse_special).decode(errors="replace")

    def piece_bytes(self, token: int, unparse_special: bool = False) -> bytes:
        """Return a token's bytes, none of control and unknown without `unparse_special`."""
        try:
            is_known = 0 <= operator.index(token) < self.n_vocab
        except TypeError:
            is_known = False
        if not is_known:
            self.token_text(token)  # raises
        if self._spans:  # read without a call: each drawn token comes here
            data, starts, stops = self._spans
            text = data[starts[token] : stops[token]].decode(errors="replace")
        else:
            text = self._vocabulary.tokens[token]
        kind = self._vocabulary.kinds.get(token, TokenKind.NORMAL)
        if kind is TokenKind.USER_DEFINED or (kind in _HIDDEN and unparse_special):
            return text.encode()
        if kind is TokenKind.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind in (TokenKind.NORMAL, TokenKind.BYTE):
            return self._scheme.decode(text)
        return b""

    def token_text(self, token: int) -> str:
        """Return a token's text as stored in the vocabulary."""
        if not is_integer(token) or not 0 <= token < self.n_vocab:
            raise InvalidRequestError(f"token id {token} is not in the vocabulary of {self.n_vocab} tokens")
        return self._vocabulary.tokens[token]

    def token_id(self, text: str) -> int | None:
        """Return the id of a token's text, or None."""
        return self._vocabulary.ids.get(text)

    def kind(self, token: int) -> TokenKind:
        """Return the token's type."""
        return self._vocabulary.kind(token)

    def is_control(self, token: int) -> bool:
        """Test for a control token, which stands for no text."""
        return self._vocabulary.kind(token) is TokenKind.CONTROL

    def _encode(self, parts: Iterable[int | str], continues: bool = False) -> list[int]:
        ids = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._scheme.encode(part, continues)
            continues = False
        return ids

    def _partition(self, text: str, specials: Iterable[tuple[str, int, bool, bool]]) -> list[int | str]:
        """Split text at special tokens: ids, and the text between them.

        Longer special tokens are found first, each from left to right, even where that breaks up shorter ones.
        """
        expect_type(text, str, "text", "a str")
        try:
            text.encode()  # faster than a search
        except UnicodeEncodeError:
            text = _LONE_SURROGATE.sub("\ufffd", text)
        taken = bytearray(len(text))
        found = []
        for special, token, strips_before, strips_after in specials:
            start = text.find(special)
            while start >= 0:
                stop = start + len(special)
                clash = taken.find(1, start, stop)
                if clash < 0:
                    if strips_before:
                        first = taken.rfind(1, 0, start) + 1
                        while start > first and text[start - 1] in _C_SPACES:
                            start -= 1
                    if strips_after and (spaces := _C_SPACE.match(text, stop)):
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
    """Incremental decoder, equal to Tokenizer.decode() on the whole sequence.

    - `holds_bytes`: true while bytes of an incomplete character are held back.
    """

    def __init__(self, tokenizer: Tokenizer, unparse_special: bool):
        self._tokenizer, self._unparse_special = tokenizer, unparse_special
        self._strip, self._at_start = tokenizer._scheme.add_space_prefix, True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.holds_bytes = False

    def feed(self, token: int) -> str:
        """Return the text a token completes; incomplete characters are held back."""
        piece = self._tokenizer.piece_bytes(token, self._unparse_special)
        if self._strip:
            piece = piece.removeprefix(b" ")
            self._strip = self._at_start and token == self._tokenizer.bos_id
        self._at_start = False
        text = self._utf8.decode(piece)
        self.holds_bytes = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the bytes held back, as U+FFFD if incomplete."""
        return self.finish(b"")

    def finish(self, piece: bytes) -> str:
        """Return the text of bytes held back, and of the last ones.

        An incomplete character becomes U+FFFD.
        """
        self.holds_bytes = False
        return self._utf8.decode(piece, final=True)
