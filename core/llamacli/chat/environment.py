"""Jinja sandbox like that of transformers, with time and memory limits.

A template comes with a model's file: it must not leave the sandbox, run without end, or fill the memory. Jinja sees to
the first, `isolation` to the others. Errors that name the line of most such templates come before: every rendering has
a `Budget`: loops and macros check the clock, and operations whose result may be much larger than their input
(operators, joins, filters, string methods) are charged before they run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import operator
import re
import time
from collections.abc import Callable, Generator, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import markupsafe
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from llamacli.chat.taint import PRECISE, TaintedStr, active_mask, mask_of, tainted_join, text_of, untainted
from llamacli.util.cancellation import setting

MAX_SECONDS = 2.0
"""CPU time of a rendering, in seconds."""

MAX_CHARACTERS = 1 << 26
"""Characters that a rendering may make, far more than conversations need. They count as often as they are copied."""

_SLOW = {"pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"}
_SLOWNESS = 16
"""Slow filters, and how many characters each of theirs counts for."""

_WHOLE = {"e", "escape", "filesizeformat", "float", "forceescape", "int", "urlencode", *_SLOW}
"""Filters whose result does not keep single characters apart: it is tainted whole."""

_OF_TEXT = {"capitalize", "center", "lower", "replace", "string", "trim", "upper"}
"""Filters that convert their operand, and operands of `replace`, to text."""

_OF_STRINGS = {"indent", "truncate"}
"""Filters of strings that use string methods only."""

_MAX_BITS = 1 << 16
"""Largest integers that a template may compute, in bits."""


class Budget:
    """Remaining budget of a rendering.

    Its `seconds` of this thread's CPU time from now on, the `characters` that it may make, and the time `now` for the
    template, by default the system's.
    """

    def __init__(self, seconds: float, characters: int, now: datetime | None = None):
        self.seconds, self.until = seconds, time.thread_time() + seconds
        self.characters, self.max_characters = characters, characters
        self.now = now


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("_budget", default=None)


def limited(budget: Budget | None = None) -> contextlib.AbstractContextManager[None]:
    """Apply a budget to compiling or rendering."""
    return setting(_budget, budget or Budget(MAX_SECONDS, MAX_CHARACTERS))


def _charge(characters: int) -> None:
    """Count characters; raise TemplateRuntimeError when the budget is used up."""
    budget = _budget.get()
    if budget:
        budget.characters -= characters
        if budget.characters < 0:
            raise jinja2.TemplateRuntimeError(f"it makes more than {budget.max_characters} characters")


class _Generation(Extension):
    """Tag `{% generation %}`, which marks text to train on; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _CodeGenerator(CodeGenerator):
    """Compiles `~` and comparisons to functions that know tainted text."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("concat(map(environment.finalize, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        if len(node.ops) != 1:
            super().visit_Compare(node, frame)
            return
        self.write(f"environment.compare({node.ops[0].op!r}, ")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write(")")


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}  # fmt: skip


class Environment(ImmutableSandboxedEnvironment):
    """Sandboxed Jinja environment for chat templates."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=text_of
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.filters |= {
            "tojson": _tojson,
            "join": _join,
            "safe": lambda value: markupsafe.Markup(str.__str__(value) if isinstance(value, str) else value),
            "format": _format,
        }
        for name in _WHOLE:
            self.filters[name] = _whole_filter(self.filters[name])
        for name in _OF_TEXT | _OF_STRINGS:
            self.filters[name] = _text_filter(self.filters[name], converts=name in _OF_TEXT)
        self.filters = {name: _charged(name, function) for name, function in self.filters.items()}
        self.tests |= {
            "in": lambda value, container: self.compare("in", value, container),
            "even": lambda value: _remainder(value, 2) == 0,
            "odd": lambda value: _remainder(value, 2) == 1,
            "divisibleby": lambda value, num: _remainder(value, num) == 0,
            "lower": lambda value: untainted(text_of(value)).islower(),
            "upper": lambda value: untainted(text_of(value)).isupper(),
            "escaped": lambda value: isinstance(value, markupsafe.Markup),
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of output."""
        return _joined("", parts)

    @property
    def clock(self) -> None:
        """Deadline check, evaluated at the start of each loop and macro body."""
        budget = _budget.get()
        if budget and time.thread_time() > budget.until:
            raise jinja2.TemplateRuntimeError(f"it takes more than {budget.seconds:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bodies: list[Any] = list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in bodies:
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("clock")).set_lineno(node.lineno))
        return template

    @staticmethod
    def compare(name: str, left: Any, right: Any) -> Any:
        """Apply a comparison operator, to original text if both are strings."""
        if isinstance(left, str) and isinstance(right, str):
            left, right = untainted(left), untainted(right)
        return _COMPARISONS[name](left, right)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator, if the result will not be too large."""
        if operator == "%":
            return _remainder(left, right)
        _charge_operator(operator, left, right)
        return _marked(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what the sandbox allows, and `append` of lists."""
        return (attr == "append" and isinstance(obj, list)) or super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Get an item or attribute, by the original text of its name."""
        return super().getitem(obj, untainted(argument) if isinstance(argument, str) else argument)

    def call(self, context: Context, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function.

        A string method only if its result will not be too large.
        """
        text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if not isinstance(text, str | bytes):
            return super().call(context, function, *args, **options)
        if isinstance(text, str):
            args = _charge_call(name, text, args, options)
        mask = active_mask()
        if mask is None or not any(map(mask.covers, (text, *args, *options.values()))):
            return super().call(context, function, *args, **options)
        if name in PRECISE and isinstance(text, str) and not isinstance(text, markupsafe.Markup):
            precise = getattr(TaintedStr(text, mask), name)
            return _marked(super().call(context, precise, *args, **options))
        plain = getattr(untainted(text), name)
        return mask.taint(super().call(context, plain, *untainted(args), **untainted(options)))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap the sandbox's `str.format` with a check of widths."""
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None
        form = value.__self__

        def checked(*args: Any, **options: Any) -> Any:
            _charge_format(form, [*args, *options.values()])
            mask = active_mask()
            if mask is None or not (mask.covers(form) or "!a" in form):
                return _marked(format_safely(*args, **options))
            plain = super(Environment, self).wrap_str_format(getattr(untainted(form), value.__name__))
            assert plain is not None
            return mask.taint(plain(*untainted(args), **untainted(options)))

        return checked


def _marked(value: Any) -> Any:
    mask = active_mask()
    return mask.marked(value) if mask else value


def _remainder(left: Any, right: Any) -> Any:
    """Compute `left % right`, if the result will not be too large."""
    _charge_operator("%", left, right)
    return _percent(left, right) if isinstance(left, str) else left % right


def _percent(left: str, right: Any) -> Any:
    """Compute `left % right`.

    Text of messages among `right` keeps its placeholders; as the format, it taints the whole result.
    """
    mask = active_mask()
    if mask is None or not (mask.covers(left) or "%a" in left):
        return _marked(left % right)
    return mask.taint(untainted(left) % untainted(right))


# --- charging


def _checked_sum(values: Iterable[Any]) -> int:
    """Sum of the numbers among arguments; OverflowError if one is too large."""
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if any(number > MAX_RANGE for number in numbers):
        raise OverflowError(f"a number beyond {MAX_RANGE}")
    return sum(numbers)


def _charge_format(form: str, values: Iterable[Any]) -> None:
    """Charge for a format: each placeholder may take the longest value."""
    values = list(values)
    longest = max((len(value) for value in values if isinstance(value, str | list | tuple | dict)), default=0)
    widest = _checked_sum([int(digits[:20]) for digits in re.findall(r"\d+", form)])
    if "*" in form or "{}" in form:  # widths may be among the values
        widest += _checked_sum(values)
    _charge(len(form) + (form.count("%") + form.count("{")) * (longest + widest))


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}.get(operator, 0)
        if bits > _MAX_BITS:
            raise OverflowError(f"an integer of more than {_MAX_BITS} bits")
    elif operator == "+" and isinstance(left, str | list | tuple):
        _charge(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                _charge(len(many) * max(0, times))
    elif operator == "%" and isinstance(left, str):
        _charge_format(
            left, right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else [right]
        )


def _charge_call(name: str, text: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Charge for a string method; its arguments, iterators made lists."""
    size = len(text) * (_SLOWNESS if name in _SLOW else 1) + _checked_sum([*args, *options.values()])
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        size += text.count(str(args[0])) * len(args[1])
    elif name == "expandtabs":
        size += text.count("\t") * max([8, *args, *options.values()])
    elif name == "join" and len(args) == 1:
        parts = list(args[0])
        args = (parts,)
        size = size * len(parts) + sum(len(part) for part in parts if isinstance(part, str))
    _charge(size)
    return args


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(function: Any, value: Any, *rest: Any, **options: Any) -> Any:
        _charge(_checked_sum([*rest, *options.values()]))
        if isinstance(value, str):
            if name == "indent":
                width = (*rest, *options.values(), 4)[0]
                _charge(value.count("\n") * (len(width) if isinstance(width, str) else int(width)))
            elif name == "format":
                _charge_format(value, [*rest, *options.values()])
            _charge_call("" if name == "join" else name, value, rest, {})  # `join` joins the value, not `rest`
        return function(value, *rest, **options)

    return _wrapped(function, apply)


def _joined(separator: str, parts: Iterable[str]) -> str:
    kept = []
    for part in parts:
        _charge(len(part) + len(separator))
        kept.append(part)
    return tainted_join(separator, kept)


# --- functions for templates


_held: contextvars.ContextVar[datetime | None] = contextvars.ContextVar("_held", default=None)


def now() -> datetime:
    """Local time, which templates may ask for."""
    return _held.get() or datetime.now()


def clock_held() -> contextlib.AbstractContextManager[None]:
    """Hold the time, for renderings that are compared."""
    return setting(_held, now())


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(untainted(message)))


def _strftime_now(form: str) -> str:
    _charge_format(form, [])
    budget = _budget.get()
    return (budget.now if budget and budget.now else now()).strftime(untainted(form))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 80:
        raise OverflowError(f"an indent of {indent}")
    plain = untainted(list(value) if isinstance(value, Generator) else value)
    text = json.dumps(
        plain, ensure_ascii=ensure_ascii, indent=untainted(indent), separators=separators, sort_keys=sort_keys
    )
    _charge(len(text))
    mask = active_mask() or mask_of(value)
    return TaintedStr(mask.mask(text), mask) if mask and mask.covers((value, indent, separators)) else text


def _format(value: Any, *args: Any, **options: Any) -> Any:
    if args and options:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return _percent(text_of(value), options or args)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, untainted(attribute)), value)
    return _joined(text_of(d), map(text_of, value))


def _whole_filter(function: Any) -> Any:
    def apply(function: Any, *operands: Any, **options: Any) -> Any:
        mask = active_mask()
        if mask is None or not (mask.covers(operands) or mask.covers(options)):
            return function(*operands, **options)
        return mask.taint(function(*untainted(operands), **untainted(options)))

    return _wrapped(function, apply)


def _text_filter(function: Any, *, converts: bool) -> Any:
    def apply(function: Any, value: Any, *rest: Any, **options: Any) -> Any:
        mask = active_mask()
        if mask is None:
            return function(value, *rest, **options)
        if converts:
            value = text_of(value)
        if not (mask.covers((value, *rest)) or mask.covers(options)):
            return function(value, *rest, **options)
        if isinstance(value, markupsafe.Markup) or not isinstance(value, str):
            return _whole_filter(function)(value, *rest, **options)
        return mask.marked(function(TaintedStr(value, mask), *rest, **options))

    return _wrapped(function, apply)


def _wrapped(function: Any, apply: Callable[..., Any]) -> Any:
    """Filter that calls `apply` with another one and its operands.

    The context or environment that the other one may take is bound to it.
    """
    if not hasattr(function, "jinja_pass_arg"):
        return functools.partial(apply, function)

    def wrapper(first: Any, *operands: Any, **options: Any) -> Any:
        return apply(functools.partial(function, first), *operands, **options)

    wrapper.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return wrapper
