"""Sandbox escapes and resource limits of templates."""

import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import ChatTemplateError
from llamacli.chat import environment
from llamacli.chat.environment import Environment, limited
from llamacli.chat.taint import CharacterMask
from llamacli.chat.template import ChatTemplate
from llamacli.testing.chats import CHATML
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from suite import examples

TOKENIZER = tokenizer_from_metadata(byte_level([], {"<s>": CONTROL}))
USER = {"role": "user", "content": "x" * 1000}

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages[0].content.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['contextlib'].sys.modules }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ ('__cl' ~ 'ass__') and (messages | attr('__cl' ~ 'ass__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ messages.insert(0, 1) }}",
    "{{ messages[0].update({'content': 'y'}) }}",
    "{{ messages[0].content._mask.unmask('') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ dict.mro()[1].__subclasses__() }}",
    "{{ ''.join.__self__.__class__.mro() }}",
    "{{ lipsum.__globals__ }}",
]

LEAKS = [
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages[0].content['__class__'] }}",
    "{{ ''['__cl' + 'ass__'] }}",
    "{{ self }}{{ self.__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ joiner.__globals__ }}",
    "{{ cycler('a').__init__ }}",
    "{{ namespace(x=1)._Namespace__attrs }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ [messages] | map(attribute='__class__.__mro__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ messages | selectattr('__class__') | list }}",
    "{{ messages | groupby('__class__') | list }}",
    "{{ [[]] | sort(attribute='__class__') | map('attr', '__doc__') | list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{a.__init__.__globals__}'.format(a=cycler) }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ ('%s' | attr('format'))('x').__class__ }}",
    "{{ (messages | attr('pop')) }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ range.__base__ }}",
    "{{ dict.fromkeys.__self__.__mro__ }}",
    "{{ 'x'.encode().__class__ }}",
    "{{ (1).__class__.__base__ }}",
    "{{ environment }}{{ context }}{{ loop }}{{ caller }}{{ __builtins__ }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}{{ f.__globals__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator }}{% endfor %}",
    "{% set x = cycler %}{{ x.next.__func__ }}",
]

BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ caller(n) }}{% endmacro %}{% for a in range(99999) %}{% for b in range(9999) %}"
    "{% call(n) f(1) %}{{ n }}{% endcall %}{% endfor %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s * 9 %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = ''.join([n.s, n.s]) %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s.replace('x', 'xxxx') %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s | replace('x', 'xxxx') %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = '%s%s' | format(n.s, n.s) %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ [1] * 10 ** 12 }}",
    "{{ 'x'.center(10 ** 12) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ 'x'.zfill(3000000000) }}",
    "{{ '\\t'.expandtabs(3000000000) }}",
    "{{ 'x' | center(3000000000) }}",
    "{{ '\\nx' | indent(3000000000) }}",
    "{{ ('\\nx' * 99999) | indent(99999) }}",
    "{{ ('\\nx' * 99999) | indent('x' * 99999) }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ '%3000000000d' | format(1) }}",
    "{{ '{:3000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 3000000000) }}",
    "{{ 'x' | tojson(indent=3000000000) }}",
    "{{ [1] | batch(3000000000, 1) | list }}",
    "{{ [1] | slice(3000000000) | list }}",
    "{{ range(3000000000) | list }}",
    "{{ range(99999) | map('center', 99999) | list | length }}",
    "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{{ lipsum(100000) }}",
    "{{ strftime_now('%3000000000d') }}",
    "{{ ('x ' * 9999999) | wordwrap(1) | length }}",
    "{{ ('x ' * 9999999) | urlize | length }}",
]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_SECONDS", 0.3)


@pytest.mark.medium
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", [*ESCAPES, *BOMBS])
def test_escapes_and_bombs_are_refused_in_time(source: str) -> None:
    before = time.process_time()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, TOKENIZER).render([USER])
    assert time.process_time() - before < 5


@pytest.mark.parametrize("source", LEAKS)
def test_nothing_of_the_interpreter_is_rendered(source: str) -> None:
    try:
        text = ChatTemplate(source, TOKENIZER).render([USER]).text
    except ChatTemplateError:
        return
    assert not re.search(r"<class|<module|<function|<code|<built-in|'__|subclass|<TemplateRef.*class", text), text


@pytest.mark.usefixtures("short")
def test_errors_name_the_exceeded_limit() -> None:
    with pytest.raises(ChatTemplateError, match=r"line 1: it takes more than 0\.3 s"):
        ChatTemplate(BOMBS[0], TOKENIZER).render([USER])
    with pytest.raises(ChatTemplateError, match="line 1: it makes more than 67108864 characters"):
        ChatTemplate(BOMBS[5], TOKENIZER).render([USER])


def test_long_conversations_stay_within_the_budget() -> None:
    template = ChatTemplate(CHATML, TOKENIZER)
    text = "word " * 400_000
    assert text in template.render([{"role": "user", "content": text}] * 3).text
    assert template.render([USER] * 5000).text.count(USER["content"]) == 5000


# --- the same text as Jinja's own

OPERANDS = [
    "c",
    "l",
    "'AbC'",
    "'zAbz'",
    "'{}'",
    "'%s'",
    "messages",
    "(l | string)",
    "(l ~ '')",
    "(c | e)",
    "c.encode()",
]
SHOWN = ["{{ %s }}", "{{ (%s) | upper }}", "{{ 'A' in (%s) }}", "{%% set x %%}{{ %s }}{%% endset %%}{{ x.find('b') }}"]
TEXTS = ["AbC", "zAbz", "a,b c", "%s", "{}", " x ", "12", "<b>&'\"", "Q\nr", "", "äß"]
LISTS = [["string", "null"], ["a,b", "A"], []]
COMPARED = ["in", "not in", "==", "!=", "<", ">=", "+", "*", "~", "%"]
NAMED = [f"{{}} | {name}{{}}" for name in Environment().filters if name != "random"]
NAMED += [f"{{}}.{name}{{}}" for name in dir(str) if not name.startswith("_")]
GIVEN = ["", "(1)", "(c)", "('A')", "(c, 'Q')", "('b', c)", "(8, c)", "(l)", "({65: c})"]
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(NAMED), st.sampled_from(OPERANDS), st.sampled_from(GIVEN)).map(
        lambda drawn: drawn[0].format(drawn[1], "()" if "." in drawn[0] and not drawn[2] else drawn[2])
    ),
    st.tuples(
        st.sampled_from(OPERANDS),
        st.sampled_from(COMPARED),
        st.sampled_from(OPERANDS),
    ).map(" ".join),
    st.tuples(st.sampled_from(OPERANDS), st.sampled_from(["c", "0", "1:", "::-1", "'x'"])).map("{0[0]}[{0[1]}]".format),
    st.tuples(st.sampled_from(OPERANDS), st.sampled_from(sorted(Environment().tests))).map(" is ".join),
)


def rendered(source: str, mask: CharacterMask | None, **given: object) -> str | None:
    """Text of a template, values masked wholly; None if it raises."""
    try:
        with limited(), mask.active() if mask else contextlib.nullcontext():
            values = {key: mask.taint(value) if mask else value for key, value in given.items()}
            text = ENVIRONMENT.from_string(source).render(values)
        return mask.unmask(text) if mask else text
    except Exception:
        return None


ENVIRONMENT = Environment()


@examples(600)
@given(OPERATIONS, st.sampled_from(SHOWN), st.sampled_from(TEXTS), st.sampled_from(LISTS))
def test_operations_on_masked_text_give_the_same_text(operation: str, shown: str, c: str, words: list[str]) -> None:
    source, given = shown % operation, {"c": c, "l": words, "messages": [{"role": "user", "content": c}]}
    mask = CharacterMask("".join(map(chr, range(33, 127))) + "äÄß", "")
    expected, found = rendered(source, None, **given), rendered(source, mask, **given)
    assert re.sub("(?i)0x[0-9a-f]+", "", found or "") == re.sub("(?i)0x[0-9a-f]+", "", expected or ""), source
    assert (found is None) == (expected is None)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ l | upper }}", "['STRING', 'NULL']"),
        ("{{ 'string' in (l | string) }}", "True"),
        ("{{ (l ~ '').split(',') }}", "[\"['string'\", \" 'null']\"]"),
        ("{{ 'AbC'.find(c) }}{{ 'AbC'.index(c) }}{{ c in 'AbC' }}", "11True"),
        ("{{ 'zbz'.replace(c, 'Q') }}{{ 'zbz' | replace(c, 'Q') }}{{ 'abc'.split(c) }}", "zQzzQz['a', 'c']"),
        ("{{ ('{}'.format(c)) == c }}{{ ('%s' | format(c)) | upper }}{{ ','.join(l).upper() }}", "TrueBSTRING,NULL"),
        ("{{ c.translate({98: 'xy'}) }}{{ c.encode() }}{{ c.encode().decode() }}", "xyb'b'b"),
        ("{{ messages | string | length }}", "34"),
        ("{{ '%s' is odd }}{{ (c ~ '%s') is even }}{{ percent is divisibleby(c) }}{{ percent is odd }}", "False" * 4),
        ("{{ 5 is odd }}{{ 4 is even }}{{ 9 is divisibleby 3 }}{{ percent % 4 }}", "TrueTrueTrue4"),
    ],
)
def test_text_of_lists_and_methods_of_literals(source: str, expected: str) -> None:
    given = {"c": "b", "percent": "%s", "l": ["string", "null"], "messages": [{"role": "user", "content": "b"}]}
    assert rendered(source, None, **given) == expected
    assert rendered(source, CharacterMask("".join(map(chr, range(33, 127))), ""), **given) == expected


JINJA = Environment()
VALUES = ["m.content", "m", "messages", "m.role", "m.tool_calls", "'a'", "range(5)", "nothing", "1"]
STEPS = [*(f"|{name}" for name in JINJA.filters), *(f".{name}" for name in dir(str) if not name.startswith("_"))]
OTHERS = [f" is {name}" for name in JINJA.tests if name.isalpha()] + ["[0]", "[::-1]", " ~ 'x'", " + m.content", " * 2"]
ARGUMENTS = ["", "()", "(1)", "('a')", "('a', 'b')", "(m)", "(m.content)", "('a', m.content)", "(99999)"]
WORDS = (
    "{{ }} {% %} {# #} - if else endif for in endfor set macro endmacro call raw with generation m ( ) | ~ 'a' 1 , ."
)
EXPRESSIONS = st.builds(
    lambda value, steps: f"{{% for m in messages %}}{{{{ {value}{''.join(steps)} }}}}{{% endfor %}}",
    st.sampled_from(VALUES),
    st.lists(st.one_of(st.sampled_from(OTHERS), st.tuples(*map(st.sampled_from, (STEPS, ARGUMENTS))).map("".join))),
)
CALL = {"id": "<s>", "function": {"name": "<s>", "arguments": {"<s>": ["<s>"]}}}
TALK = [{"role": "user", "content": "Hi <s> s"}, {"role": "assistant", "content": "<s>", "tool_calls": [CALL]}]


@examples(300)
@given(EXPRESSIONS | st.lists(st.sampled_from(WORDS.split())).map(" ".join))
def test_any_template_renders_or_raises_and_keeps_text_tainted(source: str) -> None:
    with contextlib.suppress(ChatTemplateError):
        parts = ChatTemplate(source, TOKENIZER).render(TALK).parts
        assert all(isinstance(part, str) for part in parts)
