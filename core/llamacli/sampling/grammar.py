"""Sampling constrained by a grammar or JSON Schema, with llguidance's token masks."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from llamacli.errors import InvalidRequestError, TokenizerError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.sampler import Sampler
from llamacli.sampling.schemas import close_objects, expect_depth
from llamacli.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LARK = "%llguidance"
_SCHEMA_OPTIONS = {
    "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?",  # some models write unlimited white space endlessly
    "coerce_one_of": True,
}
_SMALL_TEXT, _SMALL_STACK, _STACK_PER_BYTE = 4 << 10, 8 << 20, 1 << 10
"""Bytes of a grammar that any stack can compile; of the stack of another, and more for each of its bytes.

llguidance follows references by recursion: a rule of six bytes that names the next one takes 3 KB.
"""
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOWEST = -9.2e18
"""Lowest number of a schema: llguidance's ranges are 64-bit integers, and negating -2^63 makes it recurse until the
process dies."""

T = TypeVar("T")

_stack_lock = threading.Lock()
_tokenizers: weakref.WeakKeyDictionary[Tokenizer, LLTokenizer] = weakref.WeakKeyDictionary()


class Grammar(Sampler):
    """Keep only tokens that the grammar allows next.

    Where the text is complete, tokens that end generation are allowed. The grammar matches the text of normal tokens of
    `tokenizer`; a special token never matches its own spelling. Created by `from_gbnf` or `from_json_schema`.
    """

    def __init__(self, tokenizer: Tokenizer, beginning: LLMatcher):
        self.tokenizer, self._beginning = tokenizer, beginning
        self._mask = np.zeros(-(-tokenizer.n_vocab // 32), np.int32)
        self._matcher: LLMatcher = beginning.deep_copy()

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Self:
        """Compile a GBNF grammar, starting at its rule `root`.

        Text that begins with `%llguidance` is llguidance's Lark instead. Raises InvalidRequestError with line and
        reason if the grammar is not valid.
        """
        from llamacli.sampling.gbnf import parse_gbnf  # deferred: most runs have no grammar
        from llamacli.sampling.lexemes import to_lark

        engine = _engine()
        try:
            lark = text if text.startswith(_LARK) else to_lark(parse_gbnf(text, tokenizer.token_id), tokenizer.eog_ids)
        except RecursionError:
            raise InvalidRequestError("grammar: its rules are nested too deeply") from None
        if lark is text:
            _check_numbers("grammar", text)  # it may hold JSON Schemas
        grammar = engine.grammar_from_lark(lark)
        return cls(tokenizer, _with_stack_for(lark, lambda: _matcher(tokenizer, grammar, "grammar")))

    @classmethod
    def from_json_schema(cls, schema: str, tokenizer: Tokenizer) -> Self:
        """Compile a JSON Schema, given as JSON text.

        `oneOf` is treated as `anyOf`; objects that list properties take no others unless `additionalProperties` says
        so, as llama.cpp's. Raises InvalidRequestError with line and reason if the schema is not valid, or
        uses a feature that is not supported.
        """
        engine = _engine()
        try:
            parsed = json.loads(schema)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"json_schema: line {error.lineno}, column {error.colno}: {error.msg}") from None
        except RecursionError:
            raise InvalidRequestError("json_schema: line 1: nested too deeply") from None
        if not isinstance(parsed, dict) and parsed is not True:
            raise InvalidRequestError("json_schema: line 1: a schema must be an object or true")
        expect_depth(parsed)
        try:
            closed = json.dumps({} if parsed is True else close_objects(parsed))
            grammar = engine.grammar_from_json_schema(closed, overrides=_SCHEMA_OPTIONS)
        except RecursionError:
            raise InvalidRequestError("json_schema: line 1: nested too deeply") from None
        except ValueError as error:  # Python's JSON has NaN, infinities and lone surrogates
            if "recursion limit" in str(error):
                raise InvalidRequestError("json_schema: line 1: nested too deeply") from None
            raise InvalidRequestError(
                f"json_schema: line 1: {str(error).partition(' at line')[0]}; a schema must be standard JSON, "
                "with finite numbers and whole characters"
            ) from None
        _check_numbers("json_schema: line 1", _JSON_STRING.sub("", closed))
        reason = _with_stack_for(closed, lambda: engine.validate_grammar(grammar))
        if reason:
            raise InvalidRequestError(f"json_schema: line {_line_of(schema, reason)}: {_first_line(reason)}")
        return cls(tokenizer, _with_stack_for(closed, lambda: _matcher(tokenizer, grammar, "json_schema")))

    def apply(self, candidates: Candidates) -> None:
        """Apply the token mask.

        Raises InvalidRequestError if no token is allowed, or if computing the mask exceeds llguidance's limits.
        """
        self.restrict(candidates)

    def restrict(self, candidates: Candidates) -> None:
        """Apply the token mask, as `apply`."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        _raise_if_failed(self._matcher)
        fits = np.unpackbits(self._mask.view(np.uint8), bitorder="little").view(np.bool_)
        if len(candidates) == candidates.n_vocab:
            candidates.keep_where(fits[: len(candidates)])
        else:
            candidates.keep_where(fits[candidates.ids])
        candidates.check_drawable()

    def accept(self, token: int) -> None:
        """Advance the grammar by a token.

        Raises InvalidRequestError, with the state unchanged, if the grammar does not allow the token.
        """
        if self._matcher.try_consume_tokens([token]):
            return
        after = self._matcher.deep_copy()  # fails with a reason, or accepts an end token
        after.consume_token(token)
        _raise_if_failed(after)
        self._matcher = after

    def accept_bytes(self, data: bytes) -> None:
        """Advance by text that is not aligned to tokens.

        Raises InvalidRequestError like `accept`.
        """
        for token in _trie(self.tokenizer).tokenize_bytes(data):
            self.accept(token)

    def reset(self) -> None:
        """Reset to the start of the grammar."""
        self._matcher = self._beginning.deep_copy()

    def clone(self) -> Self:
        """A copy in the same state."""
        other = type(self)(self.tokenizer, self._beginning)
        other._matcher = self._matcher.deep_copy()
        return other


def prepare(tokenizer: Tokenizer) -> None:
    """Build what all grammars of a vocabulary share; takes about a second.

    The first grammar does it otherwise. Raises InvalidRequestError without llguidance or an end-of-generation token.
    """
    _engine()
    _trie(tokenizer)


def _with_stack_for(text: str, compile_text: Callable[[], T]) -> T:
    """Call a function in a thread with a stack for a text.

    A stack that overflows ends the process. Raises InvalidRequestError if there is no such stack.
    """
    if len(text) <= _SMALL_TEXT:
        return compile_text()
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(compile_text())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_SMALL_STACK + (len(text) * _STACK_PER_BYTE & -_SMALL_TEXT))
        try:
            threading.Thread(target=work, name="llamacli-grammar").start()
        except RuntimeError:
            raise InvalidRequestError(f"grammar: there is no memory to compile {len(text)} bytes") from None
        finally:
            threading.stack_size(before)
    return done.result()


def _raise_if_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequestError(f"grammar: {_first_line(matcher.get_error())}")


def _check_numbers(name: str, text: str) -> None:
    """Raise InvalidRequestError for a number that would end the process."""
    for number in _NEGATIVE.findall(text):
        if float(number) < _LOWEST:
            raise InvalidRequestError(f"{name}: the number {number[:40]} is below {_LOWEST:g}, the lowest allowed")


def _engine() -> type[LLMatcher]:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequestError(
            "grammars and JSON Schemas need llguidance: pip install 'llamacli[grammar]'"
        ) from None
    return llguidance.LLMatcher


def _matcher(tokenizer: Tokenizer, grammar: str, name: str) -> LLMatcher:
    matcher = _engine()(_trie(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise InvalidRequestError(f"{name}: {_first_line(matcher.get_error())}")
    return matcher


def _trie(tokenizer: Tokenizer) -> LLTokenizer:
    """LLTokenizer of a vocabulary, cached; building takes tenths of a second."""
    if tokenizer not in _tokenizers:
        from llguidance import LLTokenizer

        if not tokenizer.eog_ids:
            raise InvalidRequestError("grammar: the vocabulary has no end-of-generation token")
        _tokenizers[tokenizer] = LLTokenizer(_Vocabulary(tokenizer), eos_token=sorted(tokenizer.eog_ids))
    return _tokenizers[tokenizer]


class _Vocabulary:
    """Vocabulary interface that LLTokenizer expects.

    Tokens without text are special tokens: they match no text of a grammar.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = weakref.ref(tokenizer)
        self._pieces = [tokenizer.piece_bytes(token) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = [token for token, piece in enumerate(self._pieces) if not piece]
        self.tokens = [piece or tokenizer.token_text(token).encode() for token, piece in enumerate(self._pieces)]
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, min(tokenizer.eog_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text that the grammar forces; only its first token is used."""
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
    """Line of the schema's string on which an error message ends."""

    def end(found: re.Match[str]) -> int:
        place = reason.rfind(found[1].lstrip("#"))
        return place + len(found[1]) if place >= 0 and found[1] else 0

    last = max(_JSON_STRING.finditer(schema), key=end, default=None)
    return schema.count("\n", 0, last.start()) + 1 if last and end(last) else 1
