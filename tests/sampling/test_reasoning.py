"""Grammars after reasoning, and budgets of reasoning."""

import numpy as np
import pytest

from candidates import start
from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling import Grammar, GrammarAfter, Sampler, build_chain
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

pytest.importorskip("llguidance")

KINDS = {"</s>": CONTROL, "<think>": CONTROL, "</think>": CONTROL, "<c>": CONTROL, "<m>": CONTROL}
TOKENIZER = tokenizer_from_metadata(byte_level(["Ċ Ċ"], KINDS, eos_token_id=257))
END = 257


def make(opens: str, *closes: str, gbnf: str = 'root ::= "{" [a-c]* "}"') -> GrammarAfter:
    return GrammarAfter(Grammar.from_gbnf(gbnf, TOKENIZER), opens, closes)


def ids_that_fit(grammar: GrammarAfter) -> list[int]:
    candidates = start(np.zeros(TOKENIZER.n_vocab))
    grammar.apply(candidates)
    return candidates.ids.tolist()


def fits(grammar: GrammarAfter) -> set[str]:
    """Pieces of the allowed next tokens."""
    return {TOKENIZER.token_text(token) if token > 256 else TOKENIZER.piece(token) for token in ids_that_fit(grammar)}


def is_free(grammar: GrammarAfter) -> bool:
    """True if any token but the end token may come next."""
    return ids_that_fit(grammar) == [token for token in range(TOKENIZER.n_vocab) if token != END]


def accept(grammar: Sampler, text: str) -> None:
    for token in TOKENIZER.encode(text, add_special=False, parse_special=True):
        grammar.accept(token)


@pytest.mark.parametrize("blank", ["", "\n\n", "\n", " "])
def test_reasoning_that_the_prompt_has_opened(blank: str) -> None:
    grammar = make("", "</think>")
    for _ in range(2):
        for text in ("{x", "}<thi", "nk>"):
            assert is_free(grammar)
            accept(grammar, text)
        accept(grammar, "</think>")
        assert fits(grammar) == {"{", "\n", "\n\n", " "}
        accept(grammar, blank)
        assert "{" in fits(grammar)
        accept(grammar, "{ab")
        assert fits(grammar) == {*"abc}"}
        accept(grammar, "}")
        assert fits(grammar) == {"</s>"}
        grammar.reset()


def test_reasoning_may_end_at_once() -> None:
    grammar = make("", "</think>")
    accept(grammar, "</think>")
    assert fits(grammar) == {"{", "\n", "\n\n", " "}


def test_white_space_after_reasoning_is_not_the_opening_again() -> None:
    grammar = make("<think>\n", "</think>")
    accept(grammar, "<think>\nabc</think>\n")
    assert fits(grammar) == {"{"}


def test_reasoning_is_optional_unless_opened() -> None:
    grammar = make("<think>", "</think>")
    assert fits(grammar) == {"{", "<think>"}
    without = grammar.clone()
    accept(without, "{")
    assert fits(without) == {*"abc}"}
    accept(grammar, "<think>")
    assert is_free(grammar)
    accept(grammar, "abc</think>")
    assert "{" in fits(grammar)
    with pytest.raises(InvalidRequestError, match="grammar: "):
        accept(grammar, "x")


def test_markers_of_characters_come_in_any_division() -> None:
    grammar = make("<r>", "</r>")
    assert fits(grammar) == {"{", "<"}
    accept(grammar, "<")
    assert fits(grammar) == {"r"}
    with pytest.raises(InvalidRequestError, match="does not continue '<r>'"):
        accept(grammar, "x")
    accept(grammar, "r>a</</r>")
    assert "{" in fits(grammar)


def test_closing_texts_come_in_order() -> None:
    grammar = make("", "<c>final", "<m>")
    accept(grammar, "<m>x<c>other<m>y<c>final json")
    assert is_free(grammar)
    copy = grammar.clone()
    accept(copy, "<m>{")
    assert fits(copy) == {*"abc}"}
    assert is_free(grammar)


def test_parameters_build_it() -> None:
    chain = build_chain(SamplingParams(grammar='root ::= "a"', grammar_after=("", "</think>")), TOKENIZER)
    assert isinstance(chain.samplers[0], GrammarAfter)
    for wrong, message in (
        ({"grammar_after": ("", "x")}, "grammar_after need a grammar"),
        ({"grammar": 'root ::= "a"', "grammar_after": ("x",)}, "must be non-empty strings"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            build_chain(SamplingParams(**wrong), TOKENIZER)


# --- budgets


def budget(n: int, *markers: str, message: str = "") -> Sampler:
    params = SamplingParams(reasoning_budget=n, reasoning_budget_message=message, reasoning_markers=markers)
    return build_chain(params, TOKENIZER).samplers[0]


def forced(sampler: Sampler) -> str | None:
    """Token that alone is allowed, None if all are."""
    candidates = start(np.zeros(TOKENIZER.n_vocab))
    sampler.apply(candidates)
    ids = candidates.ids.tolist()
    assert len(ids) in (1, TOKENIZER.n_vocab)
    return TOKENIZER.token_text(ids[0]) if len(ids) == 1 else None


@pytest.mark.parametrize("opens", ["", "<think>", "<m><c>"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_the_end_of_reasoning_is_forced(n: int, opens: str) -> None:
    sampler = budget(n, opens, "</think>", message="No.")
    for _ in range(2):
        if opens:
            assert forced(sampler) is None
            accept(sampler, f"hm{opens}")
        for character in "abcde"[:n]:
            assert forced(sampler) is None
            accept(sampler, character)
        for wanted in ("N", "o", ".", "</think>"):
            assert forced(sampler.clone()) == wanted
            accept(sampler, wanted)
        assert forced(sampler) is None
        accept(sampler, "abcdefg")
        assert forced(sampler) is None
        sampler.reset()


def test_reasoning_that_ends_in_time() -> None:
    sampler = budget(4, "<think>", "</think>")
    accept(sampler, "<think>ab</think>and much more text")
    assert forced(sampler) is None
    accept(sampler, "<think>")
    assert forced(sampler) is None  # one token is left: those of all reasoning are counted together
    accept(sampler, "c")
    assert forced(sampler) == "</think>"


@pytest.mark.parametrize("character", ["a", "é", "€", "\N{FOX FACE}"])
def test_characters_are_completed_before_the_forced_end(character: str) -> None:
    sampler, first, *rest = budget(1, "", "</think>"), *TOKENIZER.encode(character, add_special=False)
    sampler.accept(first)
    for token in rest:
        assert forced(sampler) is None
        sampler.accept(token)
    assert forced(sampler) == "</think>"


def test_budgets_that_are_off() -> None:
    for params in (SamplingParams(reasoning_budget=3), SamplingParams(reasoning_markers=("", "</think>"))):
        assert len(build_chain(params, TOKENIZER).samplers) == 1
    with pytest.raises(InvalidRequestError, match="reasoning_markers must be two texts"):
        budget(1, "<think>")
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        build_chain(SamplingParams(reasoning_budget=1, reasoning_markers=("", "x")))
