"""Sampling constrained by a grammar or JSON Schema, with llguidance's token masks."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import numpy as np

from llamacli.errors import GrammarError, InvalidRequestError, TokenizerError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.gbnf import MAX_SHORTEST, parse_gbnf
from llamacli.sampling.patterns import shortest_text
from llamacli.sampling.sampler import Restriction
from llamacli.sampling.schemas import close_objects, expect_depth
from llamacli.tokenizer import Tokenizer
from llamacli.util.locking import fork_safe
from llamacli.util.memory import expect_free

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LARK = "%llguidance"
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Option of Lark: the model draws each token, where there is one text only too.

llguidance writes such a text out until there is a choice or an end. It does not notice a text without end: after `/a+/`
each "a" belongs to the longest match, and an "a" that must come next never comes. Translated GBNF has no such lexemes,
and JSON Schemas have white space of two kinds between theirs, which is a choice.
"""
_SCHEMA_OPTIONS = {
    "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?",  # some models write unlimited white space endlessly
    "coerce_one_of": True,
}
_MIN_FORCED = 1 << 10
"""Bytes of a forced text that are tokenized; more with long tokens."""
_SMALL_TEXT, _SMALL_STACK, _STACK_PER_BYTE = 4 << 10, 8 << 20, 1 << 10
"""Bytes of a grammar that any stack can compile; of the stack of another, and more for each of its bytes.

llguidance follows references by recursion: a rule of six bytes that names the next one takes 3 KB.
"""
_FEW_STATES, _MANY_STATES = 8_000, 250_000
"""States of a lexer that uses of a grammar share, and of one that a long text needs.

A string with `maxLength` has about nine states for each of its characters.
"""
_STATE_BYTES, _BYTES_PER_CHARACTER = 1400, 64
"""Memory of a state, and of each character of a grammar's text."""
_TOKEN_BYTES, _SPARE = 256, 16 << 20
"""Memory of a token in llguidance, and of its threads and the rest."""
_FULL = "too many states"
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PATTERN = re.compile(r'"pattern"\s*:\s*("(?:[^"\\]|\\.)*")')
_LARK_ITEM = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/((?:[^/\\\n]|\\.)+)/')
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOWEST = -9.2e18
"""Lowest number of a schema: llguidance's ranges are 64-bit integers, and negating -2^63 makes it recurse until the
process dies."""

T = TypeVar("T")

_stack_lock = fork_safe(threading.Lock())
_tokenizers: weakref.WeakKeyDictionary[Tokenizer, LLTokenizer] = weakref.WeakKeyDictionary()
_unspelled_bytes: weakref.WeakKeyDictionary[Tokenizer, frozenset[int]] = weakref.WeakKeyDictionary()
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}


@attrs.define(eq=False)
class _Compiled:
    """Compiled grammar that its uses share.

    So they share the lexer, whose states are made as texts need them. `forces`: llguidance writes out text without
    alternatives.
    """

    tokenizer: Tokenizer
    source: str
    name: str
    forces: bool
    beginning: LLMatcher = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.beginning = self.matcher(_FEW_STATES)
        forced = self.beginning.deep_copy().compute_ff_bytes() if self.forces else b""
        if len(forced) > MAX_SHORTEST:
            raise InvalidRequestError(f"{self.name}: it begins with a text of more than {MAX_SHORTEST} bytes")
        if not _unspelled(self.tokenizer).isdisjoint(forced):
            text = _cut(forced, 40).decode(errors="replace")
            raise InvalidRequestError(f"{self.name}: it begins with {text!r}, which no tokens spell")

    def matcher(self, n_states: int) -> LLMatcher:
        return _with_stack_for(self.source, lambda: _matcher(self.tokenizer, self.source, self.name, n_states))

    def renew(self, full: LLMatcher) -> None:
        if self.beginning is full:
            self.beginning = self.matcher(_FEW_STATES)


class Grammar(Restriction):
    """Keep only tokens that the grammar allows next.

    Where the text is complete, tokens that end generation are allowed. The grammar matches the text of normal tokens of
    `tokenizer`; a special token never matches its own spelling. Created by `from_gbnf` or `from_json_schema`.
    """

    def __init__(self, compiled: _Compiled):
        self.tokenizer, self._compiled = compiled.tokenizer, compiled
        self._mask = np.zeros(-(-self.tokenizer.n_vocab // 32), np.int32)
        self._accepted: list[int] = []
        self._shared: LLMatcher | None = None
        self._begun: LLMatcher | None = None

    @property
    def _matcher(self) -> LLMatcher:
        """Matcher in the present state, made when it is needed.

        `_shared` is the one whose lexer it shares, None for a lexer of its own.
        """
        if self._begun is None:
            self._shared = self._compiled.beginning
            self._begun = self._shared.deep_copy()
        return self._begun

    @classmethod
    def from_gbnf(cls, text: str, tokenizer: Tokenizer) -> Self:
        """Compile a GBNF grammar, starting at its rule `root`.

        Text that begins with `%llguidance` is llguidance's Lark instead. Raises InvalidRequestError with line and
        reason if the grammar is not valid.
        """
        from llamacli.sampling.lexemes import to_lark  # deferred: most runs have no grammar

        engine = _engine()
        try:
            if text.startswith(_LARK):
                lark = text
            else:
                rules = parse_gbnf(text, tokenizer.token_id, _unspelled(tokenizer))
                lark = to_lark(rules, tokenizer.eog_ids)
        except RecursionError:
            raise InvalidRequestError("grammar: its rules are nested too deeply") from None
        if lark is not text:
            return cls(_Compiled(tokenizer, engine.grammar_from_lark(lark), "grammar", forces=True))
        _check_numbers("grammar", text)  # it may hold JSON Schemas
        _check_patterns("grammar", [found[1] for found in _LARK_ITEM.finditer(text) if found[1]])
        _check_patterns("grammar", map(_unquoted, _PATTERN.findall(text)))
        source = engine.grammar_from_lark(f"{text}\n{_NO_FORCING}")  # the last statement decides
        return cls(_Compiled(tokenizer, source, "grammar", forces=False))

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
        _check_patterns("json_schema: line 1", _patterns(parsed))
        reason = _with_stack_for(closed, lambda: engine.validate_grammar(grammar))
        if reason:
            raise InvalidRequestError(f"json_schema: line {_line_of(schema, reason)}: {_first_line(reason)}")
        return cls(_Compiled(tokenizer, grammar, "json_schema", forces=True))

    def restrict(self, candidates: Candidates) -> None:
        """Apply the token mask.

        Raises InvalidRequestError if no token is allowed, GrammarError if that exceeds llguidance's limits.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._outgrown(self._matcher):
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

        Raises GrammarError, with the state unchanged, if the grammar does not allow the token, or if that exceeds
        llguidance's limits.
        """
        if not self._matcher.try_consume_tokens([token]):
            after = self._matcher.deep_copy()  # fails with a reason, or accepts an end token
            after.consume_token(token)
            if self._outgrown(after):
                self.accept(token)
                return
            _raise_if_failed(after)
            self._begun = after
        self._accepted.append(token)

    def accept_bytes(self, data: bytes) -> None:
        """Advance by text that is not aligned to tokens; GrammarError like `accept`."""
        for token in _trie(self.tokenizer).tokenize_bytes(data):
            self.accept(token)

    def reset(self) -> None:
        """Reset to the start of the grammar."""
        self._accepted, self._shared, self._begun = [], None, None

    def clone(self) -> Self:
        """A copy in the same state."""
        other = type(self)(self._compiled)
        if self._begun is not None:
            other._begun, other._shared = self._begun.deep_copy(), self._shared
        other._accepted += self._accepted
        return other

    def _outgrown(self, matcher: LLMatcher) -> bool:
        """Get a lexer of its own if the shared one is full.

        Returns True if so: then the grammar is in the state that it was in.
        The memory of kept grammars stays small so, while a long text may take more as long as it is written.
        """
        if self._shared is None or not matcher.is_error() or _FULL not in matcher.get_error():
            return False
        self._compiled.renew(self._shared)
        self._shared, self._begun = None, self._compiled.matcher(_MANY_STATES)
        self._begun.consume_tokens(self._accepted)
        return True


def memory_limit(text: str) -> int:
    """Bytes that a compiled grammar may take, with its uses' states."""
    return _FEW_STATES * _STATE_BYTES + len(text) * _BYTES_PER_CHARACTER


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
    pool = ThreadPoolExecutor(1, "llamacli-grammar")
    with _stack_lock:
        before = threading.stack_size(_SMALL_STACK + (len(text) * _STACK_PER_BYTE & -_SMALL_TEXT))
        try:
            done = pool.submit(compile_text)
        except RuntimeError:
            raise InvalidRequestError(f"grammar: there is no memory to compile {len(text)} bytes") from None
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return done.result()


def _raise_if_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"grammar: {_first_line(matcher.get_error())}")


def _check_numbers(name: str, text: str) -> None:
    """Raise InvalidRequestError for a number that would end the process."""
    for number in _NEGATIVE.findall(text):
        if float(number) < _LOWEST:
            raise InvalidRequestError(f"{name}: the number {number[:40]} is below {_LOWEST:g}, the lowest allowed")


def _check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raise InvalidRequestError for a regular expression that has long texts only.

    Such a text is written out, and a lexer has a state for each of its characters.
    """
    for pattern in patterns:
        if shortest_text(pattern) > MAX_SHORTEST:
            raise InvalidRequestError(
                f"{name}: the pattern {pattern[:40]!r} matches no text of at most {MAX_SHORTEST} characters"
            )


def _patterns(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            if isinstance(part.get("patternProperties"), dict):
                yield from part["patternProperties"]
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _unquoted(text: str) -> str:
    """Text of a JSON string, as it is where it is none."""
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _engine() -> type[LLMatcher]:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise InvalidRequestError("grammars and JSON Schemas need llguidance: pip install llguidance") from None
    except ImportError as error:  # such as a limit of the address space
        raise InvalidRequestError(
            f"grammars and JSON Schemas need llguidance, which cannot be loaded: {error}"
        ) from None
    return llguidance.LLMatcher


def _matcher(tokenizer: Tokenizer, grammar: str, name: str, n_states: int) -> LLMatcher:
    from llguidance import LLParserLimits

    trie, limits = _trie(tokenizer), LLParserLimits(max_lexer_states=n_states)
    expect_free(memory_limit(grammar) + _SPARE, "to compile a grammar")
    matcher = _engine()(trie, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequestError(f"{name}: {_first_line(matcher.get_error())}")
    return matcher


def _trie(tokenizer: Tokenizer) -> LLTokenizer:
    """LLTokenizer of a vocabulary, cached; building takes tenths of a second."""
    if tokenizer not in _tokenizers:
        from llguidance import LLTokenizer

        if not tokenizer.eog_ids:
            raise InvalidRequestError("grammar: the vocabulary has no end-of-generation token")
        expect_free(tokenizer.n_vocab * _TOKEN_BYTES + _SPARE, "for the tokens of a grammar")
        vocabulary = _Vocabulary(tokenizer)
        _unspelled_bytes[tokenizer] = _UTF8_BYTES.difference(*vocabulary.pieces)
        _tokenizers[tokenizer] = LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eog_ids))
    return _tokenizers[tokenizer]


def _unspelled(tokenizer: Tokenizer) -> frozenset[int]:
    """Bytes of UTF-8 that no token has."""
    _trie(tokenizer)
    return _unspelled_bytes[tokenizer]


class _Vocabulary:
    """Vocabulary interface that LLTokenizer expects; tokens without text are special."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = weakref.ref(tokenizer)
        self.pieces = [tokenizer.piece_bytes(token) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = [token for token, piece in enumerate(self.pieces) if not piece]
        self.tokens = [piece or tokenizer.token_text(token).encode() for token, piece in enumerate(self.pieces)]
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, min(tokenizer.eog_ids)
        self._longest = max(map(len, self.pieces))

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text that the grammar forces, at least its beginning.

        Only the first token is used, and this is called for each, so a long text would take time that grows with its
        square.
        """
        data = _cut(text.encode() if isinstance(text, str) else text, max(_MIN_FORCED, 4 * self._longest))
        tokenizer = self._tokenizer()
        if tokenizer is not None:
            with contextlib.suppress(TokenizerError):
                ids = tokenizer.encode_run(data.decode(errors="replace"), continues=True)
                if b"".join(self.pieces[token] for token in ids) == data:
                    return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids = []
        while data:
            lengths = range(min(len(data), self._longest), 0, -1)
            n = next((n for n in lengths if data[:n] in self._by_piece), None)
            if n is None:
                break
            ids.append(self._by_piece[data[:n]])
            data = data[n:]
        return ids

    @functools.cached_property
    def _by_piece(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.pieces) if piece}


def _cut(data: bytes, length: int) -> bytes:
    """Beginning of UTF-8 data, with whole characters."""
    for end in range(length, max(0, length - 4), -1):
        if end >= len(data) or data[end] & 0xC0 != 0x80:
            return data[:end]
    return data[:length]  # not UTF-8


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _line_of(schema: str, reason: str) -> int:
    def end(found: re.Match[str]) -> int:
        place = reason.rfind(found[1].lstrip("#"))
        return place + len(found[1]) if place >= 0 and found[1] else 0

    last = max(_JSON_STRING.finditer(schema), key=end, default=None)
    return schema.count("\n", 0, last.start()) + 1 if last and end(last) else 1
