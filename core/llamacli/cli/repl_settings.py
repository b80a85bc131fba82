"""Settings of the interactive chat: `/set` and what `/show` prints of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from llamacli.cli.sampling import FIELDS
from llamacli.cli.speculation import DEFAULT_DRAFT, LIMIT
from llamacli.cli.text import read_file, unescaped, words
from llamacli.errors import InvalidRequestError
from llamacli.util.foreign_names import OURS
from llamacli.util.numbers import is_integer

if TYPE_CHECKING:
    from llamacli import ChatSession, SamplingParams, Session

T = TypeVar("T", int, float)

_SWITCHES = {"on": True, "off": False, "true": True, "false": False}
_EFFORTS = ("low", "medium", "high")
_NONE = ("none", "off")
_ANY_JSON = '{"type": "object"}'

_ALIASES = {
    **OURS, "n": "max_tokens", "predict": "max_tokens", "reasoning_effort": "effort",
    "enable_thinking": "think", "json_schema": "schema", "stats": "verbose", "draft_n": "draft_max",
}  # fmt: skip
"""Other names of settings: those of other programs, and short ones."""

_WORDS = {
    "nothink": ("think", "off"), "quiet": ("verbose", "off"), "nohistory": ("history", "off"),
    "nowordwrap": ("wordwrap", "off"), "noformat": ("format", "off"),
    "think": ("think", "on"), "verbose": ("verbose", "on"), "history": ("history", "on"),
    "wordwrap": ("wordwrap", "on"), "log": ("log", "on"), "lookup": ("lookup", "on"),
}  # fmt: skip
"""Settings that may be named without a value, as ollama's are."""

_AT_START = {
    "n_ctx": "-c N", "c": "-c N", "threads": "-t N", "mode": "--mode",
    "kv_type": "--kv-type", "draft": "--draft FILE", "model_draft": "--draft FILE",
}  # fmt: skip
"""Settings that only the command line has, and their options."""


class Settings:
    """Settings of a chat, which `/set` changes.

    - `params`: sampling parameters. `seed`: the last one set.
    - `verbose`: print speeds after each reply. `wordwrap`: wrap lines at words. `history`: keep typed lines in a file.
      `log`: record the conversation.
    - `lookup`: draft tokens by prompt lookup, None as at the start. `draft_max`: maximum length of drafts.
    """

    def __init__(
        self,
        chat: ChatSession,
        params: SamplingParams,
        *,
        seed: int,
        verbose: bool,
        log: bool,
        draft_max: int = DEFAULT_DRAFT,
    ):
        self.chat, self.params, self.seed = chat, params, seed
        self.lookup: bool | None = None
        self.draft_max = draft_max
        self.verbose, self.log, self.wordwrap, self.history = verbose, log, True, True
        self._changed: dict[str, Any] = {}

    def use(self, chat: ChatSession, params: SamplingParams) -> None:
        """Take over another model's chat; what was set stays set."""
        chat.max_tokens = min(self.chat.max_tokens, chat.session.n_ctx)
        chat.session.set_seed(self.seed)
        self._use_drafter(chat.session, self.lookup, self.draft_max)
        self.chat, self.params = chat, attrs.evolve(params, **self._changed)

    def set(self, text: str) -> None:
        """Change a setting: `NAME VALUE`, or a name alone.

        Raises InvalidRequestError for an unknown name or a wrong value; nothing has changed then.
        """
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        key, value = name.replace("-", "_").lower(), value.strip()
        if not value and key in _WORDS:
            key, value = _WORDS[key]
        key = _ALIASES.get(key, key)
        if key in _AT_START:
            raise InvalidRequestError(
                f"{name} is fixed while a model is loaded: start llamacli run with {_AT_START[key]}"
            )
        if key not in _SETTERS and key not in FIELDS:
            similar = difflib.get_close_matches(key, [*_SETTERS, *FIELDS, *_ALIASES, *_WORDS])
            hint = f" similar: {', '.join(similar)};" if similar else ""
            raise InvalidRequestError(f"unknown setting {name!r};{hint} /set lists all")
        if not value:
            raise InvalidRequestError(f"/set {name} needs a value; now it is {self.values()[FIELDS.get(key, key)]}")
        if key in _SETTERS:
            _SETTERS[key](self, value)
        else:
            field = FIELDS[key]
            integral = is_integer(getattr(self.params, field))
            self._sample(**{field: _number(name, value, int if integral else float)})

    def values(self) -> dict[str, str]:
        """All settings as text, by name."""
        from llamacli.generation.drafters import PromptLookup

        variables, params = self.chat.variables, self.params
        think = variables.get("enable_thinking")
        return {
            "system": self.chat.system or "(none)",
            "max_tokens": str(self.chat.max_tokens),
            "seed": str(self.seed),
            "stop": " ".join(map(repr, params.stop)) or "(none)",
            "grammar": params.grammar or "(none)",
            "schema": params.json_schema or "(none)",
            "think": "(the template's)" if think is None else _on_off(bool(think)),
            "effort": str(variables.get("reasoning_effort", "(the template's)")),
            "verbose": _on_off(self.verbose),
            "wordwrap": _on_off(self.wordwrap),
            "history": _on_off(self.history),
            "log": _on_off(self.log),
            "lookup": _on_off(isinstance(self.chat.session.drafter, PromptLookup)),
            "draft_max": str(self.draft_max),
            **{field: f"{getattr(params, field):.6g}" for field in dict.fromkeys(FIELDS.values())},
        }

    def _sample(self, **changed: Any) -> None:
        params = attrs.evolve(self.params, **changed)
        self.chat.session.params = params
        self.params = params
        self._changed |= changed

    def _set_system(self, value: str) -> None:
        self.chat.system = value

    def _set_max_tokens(self, value: str) -> None:
        n = _number("max_tokens", value, int)
        self.chat.max_tokens = n if n >= 0 else self.chat.session.n_ctx

    def _set_seed(self, value: str) -> None:
        self.seed = self.chat.session.set_seed(_number("seed", value, int))

    def _set_lookup(self, value: str) -> None:
        wanted = _switched("lookup", value)
        self._use_drafter(self.chat.session, wanted, self.draft_max)
        self.lookup = wanted

    def _set_draft_max(self, value: str) -> None:
        n = _number("draft_max", value, int)
        if not 1 <= n <= LIMIT:
            raise InvalidRequestError(f"/set draft_max takes 1 to {LIMIT}, not {n}")
        self._use_drafter(self.chat.session, self.lookup, n)
        self.draft_max = n

    @staticmethod
    def _use_drafter(session: Session, lookup: bool | None, draft_max: int) -> None:
        from llamacli.generation.drafters import DraftModel, HeadDrafter, PromptLookup

        if lookup:
            session.drafter = PromptLookup(draft_max)
        elif lookup is not None:
            session.drafter = None
        elif isinstance(session.drafter, DraftModel | HeadDrafter | PromptLookup):
            session.drafter.max_tokens = draft_max

    def _set_stop(self, value: str) -> None:
        texts = () if value in _NONE else tuple(map(unescaped, words(value)))
        self._sample(stop=tuple(filter(None, texts)))

    def _set_think(self, value: str) -> None:
        if value not in _SWITCHES and value not in _EFFORTS:
            raise InvalidRequestError(f"/set think takes on, off, {', '.join(_EFFORTS)}, not {value!r}")
        if value in _EFFORTS:
            self.chat.variables["reasoning_effort"] = value
        self.chat.variables["enable_thinking"] = _SWITCHES.get(value, True)

    def _set_effort(self, value: str) -> None:
        self.chat.variables["reasoning_effort"] = value

    def _set_grammar(self, value: str) -> None:
        self._sample(grammar=_text_or_file(value), json_schema=None)

    def _set_schema(self, value: str) -> None:
        self._sample(grammar=None, json_schema=_text_or_file(value))

    def _set_format(self, value: str) -> None:
        if value != "json" and value not in _NONE:
            raise InvalidRequestError(f"/set format takes json or off, not {value!r}; /set schema takes a JSON Schema")
        self._sample(grammar=None, json_schema=_ANY_JSON if value == "json" else None)


def _switched(name: str, value: str) -> bool:
    if value not in _SWITCHES:
        raise InvalidRequestError(f"/set {name} takes on or off, not {value!r}")
    return _SWITCHES[value]


def _switch(name: str) -> Callable[[Settings, str], None]:
    return lambda settings, value: setattr(settings, name, _switched(name, value))


_SETTERS: Mapping[str, Callable[[Settings, str], None]] = {
    **{name.removeprefix("_set_"): setter for name, setter in vars(Settings).items() if name.startswith("_set_")},
    **{name: _switch(name) for name in ("verbose", "wordwrap", "history", "log")},
}
"""Functions that set a setting from text: the methods `_set_*` of Settings, and switches."""

NAMES = tuple(dict.fromkeys((*_SETTERS, *_WORDS, *FIELDS.values())))
"""Names of settings, for completion."""


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _text_or_file(value: str) -> str | None:
    if value in _NONE:
        return None
    path = Path(value).expanduser()
    try:
        is_file = path.is_file()
    except OSError:  # too long for a name
        is_file = False
    return read_file(path) if is_file else value


def _number(name: str, value: str, kind: type[T]) -> T:
    try:
        return kind(value)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise InvalidRequestError(f"/set {name} takes {expected}, not {value!r}") from None
