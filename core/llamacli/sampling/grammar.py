"""Text that has to follow a grammar or a JSON Schema: a sampler over the masks of tokens that llguidance computes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import weakref
from typing import TYPE_CHECKING, Self

import numpy as np

from llamacli.errors import InvalidRequestError, TokenizerError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.sampler import Sampler
from llamacli.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LARK = "%llguidance"
_SCHEMA_OPTIONS = {
    "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?",  # of unlimited white space some models would write no end
    "coerce_one_of": True,
}
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')

_tokenizers: weakref.WeakKeyDictionary[Tokenizer, LLTokenizer] = weakref.WeakKeyDictionary()


class Grammar(Sampler):
    """Keep only tokens with which the text can still follow a grammar; where it is complete, it may end.

    Its tokens are those of `tokenizer`. Text that special tokens spell does not count as that text. Make one with
    `from_gbnf` or `from_json_schema`.
    """

    def __init__(self, tokenizer: Tokenizer, beginning: LLMatcher):
        self.tokenizer, self._beginning = tokenizer, beginning
        self._mask = np.zeros(-(-tokenizer.n_vocab // 32), np.int32)
        self._matcher: LLMatcher = beginning.deep_copy()

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Self:
        """Follow a grammar in GBNF, from its rule `root` on; or in llguidance's Lark, if it begins with %llguidance.

        Raises InvalidRequestError that says line and reason if the grammar is broken.
        """
        from llamacli.sampling.gbnf import parse_gbnf  # deferred: most runs have no grammar
        from llamacli.sampling.lexemes import to_lark

        engine = _engine()
        try:
            lark = text if text.startswith(_LARK) else to_lark(parse_gbnf(text, tokenizer.token_id))
        except RecursionError:
            raise InvalidRequestError("grammar: its rules refer to each other too deeply") from None
        return cls(tokenizer, _matcher(tokenizer, engine.grammar_from_lark(lark), "grammar"))

    @classmethod
    def from_json_schema(cls, schema: str, tokenizer: Tokenizer) -> Self:
        """Follow a JSON Schema, given as JSON text. `oneOf` is taken as `anyOf`.

        Raises InvalidRequestError that says line and reason if the schema is broken, or asks for what is not there.
        """
        engine = _engine()
        try:
            parsed = json.loads(schema)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"json_schema: line {error.lineno}, column {error.colno}: {error.msg}") from None
        except RecursionError:
            raise InvalidRequestError("json_schema: line 1: it is nested too deeply") from None
        if not isinstance(parsed, dict) and parsed is not True:
            raise InvalidRequestError("json_schema: line 1: a schema is an object")
        grammar = engine.grammar_from_json_schema("{}" if parsed is True else schema, overrides=_SCHEMA_OPTIONS)
        reason = engine.validate_grammar(grammar)
        if reason:
            raise InvalidRequestError(f"json_schema: line {_line_of(schema, reason)}: {_first_line(reason)}")
        return cls(tokenizer, _matcher(tokenizer, grammar, "json_schema"))

    def apply(self, candidates: Candidates) -> None:
        """Keep what fits. Raises InvalidRequestError if nothing does, or if that takes too long to find out."""
        self.restrict(candidates)

    def restrict(self, candidates: Candidates) -> None:
        """The same: this is what it is for."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        _expect_sound(self._matcher)
        fits = np.unpackbits(self._mask.view(np.uint8), bitorder="little").view(np.bool_)
        if len(candidates) == candidates.n_vocab:
            candidates.keep_where(fits[: len(candidates)])
        else:
            candidates.keep_where(fits[candidates.ids])
        candidates.settle()

    def accept(self, token: int) -> None:
        """Go on after a token. Raises InvalidRequestError, and stays where it is, if the grammar does not allow it."""
        if self._matcher.try_consume_tokens([token]):
            return
        after = self._matcher.deep_copy()  # says why, after which it is of no use; or takes the end of a complete text
        after.consume_token(token)
        _expect_sound(after)
        self._matcher = after

    def accept_bytes(self, data: bytes) -> None:
        """Go on after text of which there is no token, or only the end of one. Raises what `accept` does."""
        for token in _trie(self.tokenizer).tokenize_bytes(data):
            self.accept(token)

    def reset(self) -> None:
        """Go back to the beginning of the grammar."""
        self._matcher = self._beginning.deep_copy()

    def clone(self) -> Self:
        """A copy at the same place of the grammar."""
        other = type(self)(self.tokenizer, self._beginning)
        other._matcher = self._matcher.deep_copy()
        return other


def _expect_sound(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequestError(f"grammar: {_first_line(matcher.get_error())}")


def _engine() -> type[LLMatcher]:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequestError("grammars and JSON Schemas need llguidance: pip install llamacli[grammar]") from None
    return llguidance.LLMatcher


def _matcher(tokenizer: Tokenizer, grammar: str, name: str) -> LLMatcher:
    matcher = _engine()(_trie(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise InvalidRequestError(f"{name}: {_first_line(matcher.get_error())}")
    return matcher


def _trie(tokenizer: Tokenizer) -> LLTokenizer:
    """The engine's view of a vocabulary, which takes some tenths of a second to make."""
    if tokenizer not in _tokenizers:
        from llguidance import LLTokenizer

        if not tokenizer.eog_ids:
            raise InvalidRequestError("grammar: the vocabulary has no token that would end a text which is complete")
        _tokenizers[tokenizer] = LLTokenizer(_Vocabulary(tokenizer), eos_token=sorted(tokenizer.eog_ids))
    return _tokenizers[tokenizer]


class _Vocabulary:
    """What LLTokenizer reads of a vocabulary. Tokens that are no text are special: no text of a grammar spells them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = weakref.ref(tokenizer)
        self._pieces = [tokenizer.piece_bytes(token) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = [token for token, piece in enumerate(self._pieces) if not piece]
        self.tokens = [piece or tokenizer.token_text(token).encode() for token, piece in enumerate(self._pieces)]
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, min(tokenizer.eog_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of text that a grammar leaves no choice about: of these, the first is the only one that fits."""
        data = text.encode() if isinstance(text, str) else text
        tokenizer = self._tokenizer()
        if tokenizer is not None:
            with contextlib.suppress(TokenizerError):
                ids = tokenizer.encode_run(data.decode(errors="replace"), continues=True)
                if b"".join(self._pieces[token] for token in ids) == data:
                    return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids = []
        while data:
            n = next((n for n in range(len(data), 0, -1) if data[:n] in self._by_piece), None)
            if n is None:
                break
            ids.append(self._by_piece[data[:n]])
            data = data[n:]
        return ids

    @functools.cached_property
    def _by_piece(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self._pieces) if piece}


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _line_of(schema: str, reason: str) -> int:
    """The line of what a reason speaks of: of the schema's strings that it holds, the one that it ends with."""

    def end(found: re.Match[str]) -> int:
        place = reason.rfind(found[1].lstrip("#"))
        return place + len(found[1]) if place >= 0 and found[1] else 0

    last = max(_JSON_STRING.finditer(schema), key=end, default=None)
    return schema.count("\n", 0, last.start()) + 1 if last and end(last) else 1
