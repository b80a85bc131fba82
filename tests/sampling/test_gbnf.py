"""GBNF: parse errors, and the language of compiled grammars."""

import itertools
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import InvalidRequestError
from llamacli.sampling import Grammar
from llamacli.sampling.gbnf import parse_gbnf
from llamacli.sampling.lexemes import to_lark
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.util.cancellation import cancellable_by
from suite import examples

pytest.importorskip("llguidance")

TOKENS = tokenizer_from_metadata(byte_level([], {"</s>": CONTROL, "<think>": CONTROL}, eos_token_id=256))
"""All bytes, an end, and a token that no text spells."""


def walk(grammar: Grammar, tokens: list[int]) -> bool:
    """Test if the grammar allows these tokens and then the end."""
    try:
        for token in tokens:
            grammar.accept(token)
    except InvalidRequestError:
        return False
    return grammar._matcher.is_accepting()


def follows(text: str | bytes, gbnf: str, tokenizer: Tokenizer = TOKENS) -> bool:
    data = text.encode() if isinstance(text, str) else text
    return walk(Grammar.from_gbnf(gbnf, tokenizer), list(data))


DOUBLING = "".join(f"x{i} ::= x{i + 1} x{i + 1}\n" for i in range(40))
NO_TEXT = "no text matches rule 'root': all its alternatives lead back to themselves"


@pytest.mark.parametrize(
    ("grammar", "line", "column", "reason"),
    [
        ("", 1, 1, "rule 'root' is not defined"),
        ('a ::= "x"', 1, 10, "rule 'root' is not defined"),
        ('root ::= "a" b\nb ::= c\nd ::= "x"', 2, 7, "rule 'c' is not defined"),
        ('root := "a"', 1, 6, "expected ::="),
        ('root ::= "a"\n= "b"', 2, 1, "expected the name of a rule"),
        ('root ::= "a', 1, 10, "unterminated string or character class"),
        ('root ::= "a"\n\n  | "b"', 3, 3, "expected the name of a rule"),
        ("root ::= [a-z", 1, 10, "unterminated string or character class"),
        ("root ::= []", 1, 10, "empty character class"),
        ("root ::= [z-a]", 1, 12, "the range is reversed"),
        ('root ::= ("a"\n  | "b"\n', 3, 1, "expected an item, | or ) for the ( in line 1, column 10"),
        ('root ::= "a" )', 1, 14, "expected an item, | or the end of the line"),
        ('root ::= "\\q"', 1, 11, "unknown escape \\q"),
        ('root ::= "\\x4"', 1, 11, "expected 2 hexadecimal digits after \\x"),
        ('root ::= "\\u12"', 1, 11, "expected 4 hexadecimal digits after \\u"),
        ('root ::= "\\ud800"', 1, 11, "U+D800 is not a character"),
        ('root ::= "\\U00110000"', 1, 11, "U+110000 is not a character"),
        ("root ::= * [a]", 1, 10, "expected an item, | or the end of the line"),
        ("root ::= [a]{x}", 1, 14, "expected a number"),
        ("root ::= [a]{1;2}", 1, 15, "expected }"),
        ("root ::= [a]{3,1}", 1, 13, "the maximum is less than the minimum"),
        ("root ::= [a]{2,1000001}", 1, 13, "more than 1000000 repetitions"),
        (f"root ::= [a]{{{'9' * 5000}}}", 1, 13, "more than 1000000 repetitions"),
        ("root ::= root", 1, 1, NO_TEXT),
        ('x ::= "a"\nroot ::= x y\ny ::= x root | y', 2, 1, NO_TEXT),
        ("root ::= <nothing>", 1, 10, "the vocabulary has no token <nothing>"),
        ("root ::= <[5>", 1, 10, "the vocabulary has no token <[5>"),
        ("root ::= !a", 1, 10, "expected a token as in <text> or <[id]>"),
        ("root ::= [^\\x00-\\U0010FFFF]", 1, 10, "the negated class matches no character"),
        ("root ::= " + "(" * 51, 1, 60, "nested more than 50 deep"),
        ("root ::= [a]\n" + "".join(f"x{i} ::= [a]\n" for i in range(2000)), 2001, 1, "more than 2000 rules"),
        (f'root ::= "{"a" * 100_000}"', 1, 100010, "more than 100000 items and characters"),
        ("root ::= [a]" + "*" * 60, 1, 13, "nested more than 50 deep"),
        (f'root ::= x0\n{DOUBLING}x40 ::= "a"', 25, 1, "a part of rule 'x23' has no text of at most 65536 bytes"),
        ('root ::= y | "c"\ny ::= "a" ([b]{300}{300})?', 2, 1, "a part of rule 'y' has no text of at most 65536 bytes"),
        (
            'root ::= ("\u20ac" | [\u0100-\u0200]){32769}',
            1,
            1,
            "a part of rule 'root' has no text of at most 65536 bytes",
        ),
        ("# a comment\r\nroot ::=\r\n  [a] %\r\n", 3, 7, "expected an item, | or the end of the line"),
    ],
)
def test_errors_name_line_and_reason(grammar: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_gbnf(grammar)
    assert str(raised.value) == f"grammar: line {line}, column {column}: {reason}"


def test_shortest_texts_up_to_the_limit() -> None:
    parse_gbnf("root ::= [a]{65535} [b]")
    with pytest.raises(InvalidRequestError, match="has no text of at most 65536 bytes"):
        parse_gbnf("root ::= [a]{65536} [b]")


def test_numbers_up_to_a_million() -> None:
    assert "{0,1000000}" in to_lark(parse_gbnf("root ::= [a]{0,1000000}"))


@given(st.text('ab":=|()[]{}*+?.<>!\\-^ \n#0123456789root', max_size=40))
def test_random_text_parses_or_fails_with_its_position(text: str) -> None:
    for grammar in (text, f"root ::= {text}"):
        try:
            outcome = to_lark(parse_gbnf(grammar, lambda _: 1))
        except InvalidRequestError as error:
            outcome = str(error)
        assert outcome.startswith(("grammar: line ", "start: "))


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= "a" | "ab"', ["a", "ab"], ["", "b", "abb"]),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "abcc"]),
        ('root ::= "if" | name\nname ::= [a-z]+', ["if", "i", "ifx", "iffy"], ["", "IF"]),
        ('root ::= [a-z]* "a"', ["a", "aa", "bca"], ["", "b", "ab"]),
        ('root ::= "a"?', ["", "a"], ["aa"]),
        ('root ::= "ab"{2}', ["abab"], ["ab", "abb", "ababab"]),
        ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
        ('root ::= "a"{0,2} "b"{ 1 , 2 }', ["b", "aab", "abb"], ["", "aaab", "abbb"]),
        ('root ::= "a"{2}{2}', ["aaaa"], ["aa", "aaa"]),
        ('root ::= ("a" "b")+ | ', ["", "ab", "abab"], ["a", "aba"]),
        ("root ::= [^ab]", ["c", "\n", "é", "😀"], ["a", "b", "", "cc"]),
        ("root ::= .", ["c", "\n", "é", "\x00"], ["", "ab"]),
        ('root ::= [a\\]"\\\\-] [-] [a-]', ['"--', "]-a", "\\--", "a-a", "--a"], ["b-a", "a+a"]),
        ("root ::= [\\x61-\\u0063] [é-\\u00ea] [\\U0001F600-\\U0001F602]", ["bé😁", "cê😂"], ["dé😁", "aë😀"]),
        ('root ::= "\\n\\t\\r\\\\\\"\\[\\]/"', ['\n\t\r\\"[]/'], ["n"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" # one\n\n# two\n', ["a"], [""]),
        ('root ::= (\n "a" # first\n | "b"\n)\r\n', ["a", "b"], ["ab"]),
        ('root ::= "a" |\n "b"', ["a", "b"], [""]),
        ("root ::= x-1 X1\nx-1 ::= [a]\nX1 ::= [b]", ["ab"], ["a"]),
        ('root ::= start\nstart ::= "a" r1\nr1 ::= "b"', ["ab"], ["a"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= e\ne ::= e "+" e | [0-9]', ["1", "1+2+3"], ["1+", "+"]),
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(()", ")("]),
        ('%llguidance {}\nstart: "a" | "b"', ["a", "b"], ["ab"]),
        # Lexemes that are complete at once, that begin alike, that could be read on.
        (
            'root ::= "if" p | [a-z]+ q | "!"\np ::= "(" root ")"\nq ::= "[" root "]"',
            ["if(!)", "if[!]", "iff[!]", "if(if[!])"],
            ["iff(!)", "if", "if(if)"],
        ),
        ('root ::= [a-z]+ x | "!"\nx ::= "a" root', ["!", "ba!", "aa!", "xaxa!"], ["b!", "a!"]),
        ('root ::= "a"+ x\nx ::= "ab" | root "c"', ["aab", "aaab", "aaabc"], ["ab", "aa", "aabc"]),
        ('root ::= ws "a" ws root | ws "."\nws ::= " "{0,2}', [".", " a    .", "a a."], ["a     .", "   ."]),
    ],
)
def test_accepted_texts(grammar: str, yes: list[str], no: list[str]) -> None:
    assert {text: follows(text, grammar) for text in (*yes, *no)} == dict.fromkeys(yes, True) | dict.fromkeys(no, False)


def test_tokens() -> None:
    a, think = ord("a"), 257
    for spelled in ("<think>", "<[257]>"):
        assert walk(Grammar.from_gbnf(f'root ::= {spelled} "a"', TOKENS), [think, a])
        assert not follows("<think>a", f'root ::= {spelled} "a"')
        thinking = f'root ::= {spelled} (!{spelled})* {spelled} "a"'
        assert walk(Grammar.from_gbnf(thinking, TOKENS), [think, a, a, think, a])
        assert not walk(Grammar.from_gbnf(thinking, TOKENS), [think, a, think, think, a])
    assert follows("<think>a", 'root ::= "<think>a"'), "text that looks like a token is text"
    assert not walk(Grammar.from_gbnf('root ::= "<think>a"', TOKENS), [think, a])


# A grammar as trees, and what it derives by the definition.
LEAVES = st.one_of(
    st.text("ab", max_size=2).map(lambda text: ("literal", text)),
    st.sampled_from([("class", "a"), ("class", "ab"), ("not", "a"), ("any", ""), ("rule", "x"), ("rule", "y")]),
)
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: ("sequence", items)),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: ("choice", items)),
        st.tuples(inner, st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3)])).map(lambda x: ("times", x)),
    ),
    max_leaves=6,
)
Item = tuple[str, Any]


def spell(item: Item) -> str:
    match item:
        case "literal", text:
            return f'"{text}"'
        case "class", letters:
            return f"[{letters}]"
        case "not", letters:
            return f"[^{letters}]"
        case "any", _:
            return "."
        case "rule", name:
            return name
        case "sequence", items:
            return "(" + " ".join(map(spell, items)) + ")"
        case "choice", items:
            return "(" + " | ".join(map(spell, items)) + ")"
        case _, (inner, (low, high)):
            return spell(inner) + f"{{{low},{'' if high is None else high}}}"


def ends(item: Item, text: str, start: int, rules: dict[tuple[str, int], set[int]]) -> set[int]:
    """End positions of all matches of a node from a position.

    `rules` has those of rules.
    """
    match item:
        case "literal", literal:
            return {start + len(literal)} if text.startswith(literal, start) else set()
        case ("class" | "not" | "any") as kind, letters:
            fits = start < len(text) and (kind == "any" or (text[start] in letters) == (kind == "class"))
            return {start + 1} if fits else set()
        case "rule", name:
            return rules[name, start]
        case "sequence", items:
            places = {start}
            for part in items:
                places = {end for place in places for end in ends(part, text, place, rules)}
            return places
        case "choice", items:
            return {end for part in items for end in ends(part, text, start, rules)}
        case _, (inner, (low, high)):
            places, found = {start}, {start} if low == 0 else set()
            for n in range(1, (len(text) + low if high is None else high) + 1):
                places = {end for place in places for end in ends(inner, text, place, rules)}
                found |= places if n >= low else set()
            return found


def derives(grammar: dict[str, Item], text: str) -> bool:
    """Test if the rule `root` derives a text, by fixed-point iteration."""
    rules = {(name, start): set[int]() for name in grammar for start in range(len(text) + 1)}
    while True:
        more = {(name, start): ends(grammar[name], text, start, rules) for name, start in rules}
        if more == rules:
            return len(text) in rules["root", 0]
        rules = more


@examples(150)
@given(ITEMS, ITEMS, ITEMS)
def test_language_matches_the_definition(root: Item, x: Item, y: Item) -> None:
    rules = {"root": root, "x": x, "y": y}
    source = "\n".join(f"{name} ::= {spell(item)}" for name, item in rules.items())
    try:
        grammar = Grammar.from_gbnf(source, TOKENS)
    except InvalidRequestError:
        assert not any(derives(rules, "".join(text)) for n in range(5) for text in itertools.product("ab", repeat=n))
        return
    for n in range(5):
        for letters in itertools.product("ab", repeat=n):
            text = "".join(letters)
            assert walk(grammar.clone(), list(text.encode())) == derives(rules, text), text


def test_regular_parts_become_lexemes_if_longest_match_is_safe() -> None:
    def lexemes(grammar: str) -> int:
        return to_lark(parse_gbnf(grammar)).count("/") // 2

    assert lexemes('root ::= ("a" | "ab")* [cd]{2} x\nx ::= [ef]+') == 1
    assert lexemes('root ::= "(" [a-z]+ ")" | "[" root "]"') == 3
    assert lexemes('root ::= [a-z]+ x\nx ::= "a" root | "."') == 3, "letters are taken apart: an a may follow"
    assert lexemes("root ::= [ab]* [a] [ab]{15}") == 3, "its automaton would be too large"


def test_large_and_deep_grammars() -> None:
    chain = "".join(f"x{i} ::= x{i + 1}\n" for i in range(1900))
    with pytest.raises(InvalidRequestError, match="its rules are nested too deeply"):
        Grammar.from_gbnf(f"root ::= x0\n{chain}x1900 ::= [a]", TOKENS)
    optional = Grammar.from_gbnf('root ::= "z" ([ab]?){1999} x\nx ::= "c" root | "."', TOKENS)
    assert walk(optional, list(b"zabbac" + b"z."))
    assert follows("a", f'root ::= "a" x0\n{DOUBLING}x40 ::= ""')
    assert follows("a", f'root ::= x0 | "a"\n{DOUBLING}x40 ::= "b" | ""')


def test_time_to_compare_lexemes_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'root ::= "ab" root | "cd"'
    Grammar.from_gbnf(text, TOKENS)
    monkeypatch.setattr("llamacli.sampling.lexemes._MAX_SECONDS", -1)
    with pytest.raises(InvalidRequestError, match="its rules take more than"):
        Grammar.from_gbnf(text, TOKENS)


def test_comparing_lexemes_ends_when_nobody_waits() -> None:
    left = threading.Event()
    with cancellable_by(left):
        Grammar.from_gbnf('root ::= "ab" root | "cd"', TOKENS)
        left.set()
        with pytest.raises(InvalidRequestError, match="was cancelled"):
            Grammar.from_gbnf('root ::= "ab" root | "cd"', TOKENS)
