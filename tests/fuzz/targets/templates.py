"""Chat templates: any text, mutated templates, and generated Jinja."""

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from fuzz.mutations import edited, edits
from fuzz.target import Target
from llamacli.chat.template import ChatTemplate
from llamacli.testing.chats import CHATML
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

MESSAGES = [
    {"role": "system", "content": "Be <|im_start|> brief."},
    {"role": "user", "content": "x" * 40},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "b"]}}}]},
    {"role": "tool", "content": "{}"},
    {"role": "user", "content": [{"type": "text", "text": "y"}]},
]
_ATOMS = st.sampled_from(
    ["messages", "messages[0]", "messages[-1].content", "m", "m.role", "m['content']", "tools", "bos_token",
     "none", "true",
     "0", "-1", "10", "3.5", "10 ** 10", "'a'", "'<|im_start|>'", "[1, 'b']", "{'a': m}", "loop.index", "range(10)",
     "namespace(x=1)", "''.__class__", "m.__init__", "self", "caller", "strftime_now('%Y')", "raise_exception('x')"]
)  # fmt: skip
_FILTERS = st.sampled_from(
    ["trim", "upper", "length", "list", "string", "tojson", "tojson(indent=2)", "first", "last", "join(', ')", "join",
     "items", "sort", "unique", "reverse", "map('upper')", "map(attribute='role')", "rejectattr('content')",
     "selectattr('role', 'equalto', 'user')", "replace('a', 'b')", "default('')", "int", "float", "abs", "sum", "max",
     "min", "batch(2)", "slice(2)", "groupby('role')", "dictsort", "indent(2)", "wordwrap(3)", "center(40)",
     "truncate(3)", "format(1)",
     "escape", "safe", "striptags", "urlize", "xmlattr", "random", "filesizeformat", "pprint", "attr('role')"]
)  # fmt: skip
_METHODS = st.sampled_from(
    [".strip()", ".split('a')", ".upper()", ".startswith('a')", ".items()", ".keys()", ".get('x')", ".append(1)",
     ".replace('a', 'bb')", ".format(m)", ".join(['a', 'b'])", "[0]", "[:2]", "[::-1]", ".content", ".encode()",
     ".mro()",
     ".lstrip('a')", ".find('a')", ".splitlines()", ".zfill(99)", " * 3", " + 'a'", " ~ 1", " in m", " is string",
     " is defined", " == 1", " and 1", " % 2", " if m else 1", " // 0"]
)  # fmt: skip
EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.builds("{}|{}".format, inner, _FILTERS),
        st.builds("({}){}".format, inner, _METHODS),
        st.builds("[{}, {}]".format, inner, inner),
    ),
    max_leaves=6,
)
BLOCKS = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
        st.builds("{{% set m = {} %}}".format, EXPRESSIONS),
        st.sampled_from(
            [
                "<|im_start|>",
                "text\n",
                "{%- break %}",
                "{# c #}",
                "{% continue %}",
                "\n",
                "{{",
                "%}",
                "{% generation %}",
            ]
        ),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{%- if {} -%}}{}{{% else %}}{}{{% endif %}}".format, EXPRESSIONS, inner, inner),
        st.builds("{{% macro f(m) %}}{}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
        st.builds("{{% filter upper %}}{}{{% endfilter %}}".format, inner),
        st.builds(str.__add__, inner, inner),
    ),
    max_leaves=6,
)
_MUTATED = st.builds(
    lambda changes: edited(CHATML.encode(), changes).decode("utf-8", "replace"),
    edits(("bit", "byte", "cut", "drop", "repeat"), 4),
)


def _start(folder: Path) -> Callable[[str], None]:
    tokenizer = tokenizer_from_metadata(byte_level([], {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL}))

    def render(source: str) -> None:
        template = ChatTemplate(source, tokenizer)
        rendering = template.render(MESSAGES, add_generation_prompt=True)
        assert len(rendering.text) <= 4 << 20

    render(CHATML)
    return render


TEMPLATES = Target(
    cases=st.one_of(BLOCKS, BLOCKS, _MUTATED, st.text(max_size=60)),
    start=_start,
    per_process=2000,
)
"""Chat templates."""
