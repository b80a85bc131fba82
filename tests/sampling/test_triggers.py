"""Lazy grammars with triggers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candidates import start
from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling import Grammar, LazyGrammar, SamplerState, build_chain
from llamacli.testing.vocabularies import CONTROL, UNUSED, byte_level, english
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

pytest.importorskip("llguidance")

CALL, END, HOLE = "<call>", "</s>", "<hole>"
MERGES = [*english("Ġ"), "( c"]
KINDS = {END: CONTROL, CALL: CONTROL, HOLE: UNUSED}
WORDS = tokenizer_from_metadata(byte_level(MERGES, KINDS, eos_token_id=256 + len(MERGES)))


def lazy(gbnf: str, *triggers: str, tokenizer: Tokenizer = WORDS) -> LazyGrammar:
    return LazyGrammar(Grammar.from_gbnf(gbnf, tokenizer), triggers)


def ids_that_fit(grammar: LazyGrammar) -> list[int]:
    candidates = start(np.zeros(WORDS.n_vocab))
    grammar.apply(candidates)
    return candidates.ids.tolist()


def fits(grammar: LazyGrammar) -> set[str]:
    """Pieces of the allowed next tokens."""
    return {WORDS.piece(token, unparse_special=True) for token in ids_that_fit(grammar)}


def waits(grammar: LazyGrammar) -> bool:
    """True if any token may come next."""
    return len(ids_that_fit(grammar)) == WORDS.n_vocab


def accept(grammar: LazyGrammar, text: str) -> None:
    for token in WORDS.encode(text, add_special=False, parse_special=True):
        grammar.accept(token)


def test_applies_after_the_trigger() -> None:
    grammar = lazy('root ::= "(" [xyz]+ ")"', "(")
    for _ in range(2):
        assert waits(grammar)
        accept(grammar, "the girl saw ) 12 ")
        assert waits(grammar)
        accept(grammar, "(")
        assert fits(grammar) == {*"xyz"}
        accept(grammar, "xy")
        assert fits(grammar) == {*"xyz)"}
        with pytest.raises(InvalidRequestError, match="grammar: "):
            accept(grammar, "w")
        accept(grammar, ")")
        assert fits(grammar) == {END}
        grammar.reset()


def test_a_trigger_may_begin_and_end_within_tokens() -> None:
    (token,) = WORDS.encode("the", add_special=False)
    assert WORDS.piece(token) == "the", "one token, and the trigger is a part of it"
    grammar = lazy('root ::= "he" " dog"', "he")
    for before in ("", "x"):
        accept(grammar, before)
        grammar.accept(token)
        assert all(" dog".startswith(piece) for piece in fits(grammar))
        grammar.reset()
    grammar.accept(token)
    assert all(" dog".startswith(piece) for piece in fits(grammar))
    grammar = lazy('root ::= "he" " dog"', "he")
    accept(grammar, "a")
    grammar.accept(token)
    assert all(" dog".startswith(piece) for piece in fits(grammar))
    grammar = lazy('root ::= "h d" [o]', "h d")
    accept(grammar, "such h")
    assert waits(grammar)
    accept(grammar, " d")
    assert fits(grammar) == {"o"}


def test_rest_of_the_trigger_token_must_match() -> None:
    (token,) = WORDS.encode("the", add_special=False)
    grammar = lazy('root ::= "h" "a"', "h")
    with pytest.raises(InvalidRequestError, match="grammar: "):
        grammar.accept(token)
    assert waits(grammar), "it waits still"


def test_trigger_outside_of_the_grammar_is_named() -> None:
    grammar = lazy('root ::= "(" [ab]', "(")
    with pytest.raises(
        InvalidRequestError, match=r"grammar_triggers: the grammar allows no text that begins with '\(c': grammar: "
    ):
        grammar.accept(WORDS.token_id("(c"))


def test_empty_tokens_before_a_trigger() -> None:
    grammar = lazy('root ::= "ab" [cd]', "ab")
    grammar.accept(ord("x"))
    grammar.accept(WORDS.token_id(HOLE))
    accept(grammar, "ab")
    assert fits(grammar) == {"c", "d"}


def test_trigger_spelled_by_several_tokens() -> None:
    grammar = lazy('root ::= "→" [xé] "→"', "→")
    *beginning, last = "é→".encode()
    for byte in beginning:
        grammar.accept(byte)
    assert waits(grammar), "a character is not there before its last byte is"
    grammar.accept(last)
    assert set(ids_that_fit(grammar)) == {ord("x"), "é".encode()[0]}
    accept(grammar, "é→")
    assert fits(grammar) == {END}, "what triggers may come again, as the grammar says"


def test_a_special_token_triggers() -> None:
    grammar = lazy(f"root ::= {CALL} [ab]", CALL)
    accept(grammar, "<call")
    assert waits(grammar)
    grammar.accept(WORDS.token_id(CALL))
    assert fits(grammar) == {"a", "b"}


def test_a_special_token_triggers_outside_of_reasoning_only() -> None:
    grammar = LazyGrammar(Grammar.from_gbnf(f"root ::= {CALL} [ab]", WORDS), [CALL], ("", "</t>"))
    accept(grammar, CALL)
    assert waits(grammar)
    accept(grammar, f"</t>{CALL}")
    assert fits(grammar) == {"a", "b"}


def test_the_first_of_several_triggers() -> None:
    grammar = lazy('root ::= ("yes" | "yes, no") "!"', "no", "yes")
    accept(grammar, "yes")
    assert "!" in fits(grammar)


def test_clones_are_independent() -> None:
    grammar = lazy('root ::= "ab" [cd]', "ab")
    accept(grammar, "a")
    other = grammar.clone()
    accept(other, "b")
    assert fits(other) == {"c", "d"} == fits(other.clone())
    assert waits(grammar)
    accept(grammar, "xb")
    assert waits(grammar)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_first_trigger_counts(text: str, triggers: list[str]) -> None:
    grammar = lazy("root ::= [ab]*", *triggers)
    for i, token in enumerate(text.encode()):
        grammar.accept(token)
        assert waits(grammar) != any(trigger in text[: i + 1] for trigger in triggers)


def test_parameters_create_lazy_grammars() -> None:
    params = SamplingParams(grammar='root ::= "(" [ab] ")"', grammar_triggers="(")
    assert params.grammar_triggers == ("(",)
    state = SamplerState(1, WORDS)
    state.use(params)
    for text, n in (("x", None), ("(", 2), ("a", 1)):
        (token,) = WORDS.encode(text, add_special=False)
        state.accept(token)
        legal = state.legal(np.zeros(WORDS.n_vocab, np.float32), params)
        assert len(legal) == (n or WORDS.n_vocab)
    assert state.sample(np.zeros(WORDS.n_vocab, np.float32), params) == ord(")")
    schema = build_chain(SamplingParams(json_schema={"type": "object"}, grammar_triggers=("{",)), WORDS)
    assert isinstance(schema.samplers[0], LazyGrammar)
    with pytest.raises(InvalidRequestError, match="grammar_triggers need a grammar"):
        build_chain(SamplingParams(grammar_triggers=("(",)), WORDS)
    with pytest.raises(InvalidRequestError, match="must be non-empty strings"):
        build_chain(SamplingParams(grammar="root ::= [a]", grammar_triggers=("(", "")), WORDS)


@pytest.mark.parametrize("triggers", ["(", (), [b"("], (None,)])
def test_triggers_must_be_strings(triggers: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar_triggers must be non-empty strings"):
        LazyGrammar(Grammar.from_gbnf("root ::= [a]", WORDS), triggers)


@pytest.mark.parametrize(
    ("after", "text", "triggered"),
    [
        (("<t>", "</t>"), "<t>see <c> now", False),
        (("<t>", "</t>"), "<t>see <c> now</t> <c>1", True),
        (("<t>", "</t>"), "<c>1", True),
        (("", "</t>"), "see <c> now", False),
        (("", "</t>"), "see <c> now</t><c>1", True),
        (("", "</t>"), "see</t></t><c>1", True),
        (("<t>", "</t>", "<f>"), "<t>see</t><c><f> <c>1", True),
        (("<t>", "</t>", "<f>"), "<t>see</t><c>1", False),
        (("", "</t>"), "see</t> </t> <t> <c>1", True),
        (("<t>", "</t>"), "<t>see</t> <t>see <c> now", False),
        (("<t>", "</t>"), "x<c", False),
        (("%", "%"), "%see <c> now", False),
        (("%", "%"), "%see% <c>1", True),
        ((), "<abc>xx", False),
        (("<t>", "</t>", "<f>"), "<t>see</t> <c> now", False),
        (("<t>", "</t>", "<f>"), "<t>see</t> <f><c>1", True),
    ],
)
def test_triggers_in_reasoning_are_ignored(after: tuple[str, ...], text: str, triggered: bool) -> None:
    tokenizer = tokenizer_from_metadata(byte_level([], {"</s>": CONTROL}, eos_token_id=256))
    params = SamplingParams(grammar='root ::= "<c>1"', grammar_triggers="<c>", grammar_after=after)
    chain = build_chain(params, tokenizer)
    for _ in range(2):
        for token in tokenizer.encode(text, add_special=False):
            chain.accept(token)
        if triggered:
            with pytest.raises(InvalidRequestError):
                chain.accept(tokenizer.encode("x", add_special=False)[0])
        else:
            chain.accept(tokenizer.encode("x", add_special=False)[0])
        chain.reset()
