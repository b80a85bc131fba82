"""Texts of tool calls: read in pieces, and tried by grammars."""

from typing import Any

from llamacli.chat.call_text import CallText
from llamacli.chat.calls import Notation, Schemas
from llamacli.chat.messages import CallDelta, ToolCall
from llamacli.chat.rules import Rules
from llamacli.chat.syntax import CallReader
from llamacli.errors import InvalidRequestError
from llamacli.sampling import SamplingParams, build_chain
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

BYTES = tokenizer_from_metadata(byte_level([], {"<eos>": CONTROL, "<t>": CONTROL}, eos_token_id=256))
"""Tokenizer of bytes, an end token, and a special token."""


def calls_in(notation: Notation, text: str, schemas: Schemas, closes: str = "") -> list[tuple[str, Any]]:
    """Names and arguments of the calls in a text.

    They are the same for pieces of any size. Arguments of a call that is cut or invalid are a text. Text behind the
    calls comes last, after "rest".
    """
    found = [_calls_by(size, notation, text, schemas, closes) for size in (len(text) or 1, 1, 2, 3)]
    assert found.count(found[0]) == len(found)
    return found[0]


def _calls_by(size: int, notation: Notation, text: str, schemas: Schemas, closes: str) -> list[tuple[str, Any]]:
    source = CallText()
    reader = CallReader(source, notation.read(source, schemas, closes))
    events = [event for end in range(0, len(text), size) for event in reader.read(text[:end], final=False)]
    events += reader.read(text, final=True)
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert "".join(event.text for event in events if isinstance(event, CallDelta)) == "".join(
        event.text for event in calls
    )
    rest = text[source.at :] if reader.has_begun else text
    return [
        *((call.name, call.arguments if call.partial is None else call.partial) for call in calls),
        *([("rest", rest)] if rest.strip() else []),
    ]


def sent(notation: Notation, text: str, schemas: Schemas) -> str:
    """Text of arguments that is certain after a text, which goes on."""
    source = CallText()
    reader = CallReader(source, notation.read(source, schemas, ""))
    return "".join(event.text for event in reader.read(text, final=False) if isinstance(event, CallDelta))


def allows(rules: Rules, start: str, text: str) -> bool:
    """True if a grammar allows a text, and its end there."""
    chain = build_chain(SamplingParams(grammar=rules.grammar(start)), rules.tokenizer)
    tokens = rules.tokenizer.encode(text, add_special=False, parse_special=True)
    try:
        for token in [*tokens, min(rules.tokenizer.eog_ids)]:
            chain.accept(token)
    except InvalidRequestError:
        return False
    return True


def notation_allows(notation: Notation, text: str, schema: dict[str, Any], tokenizer: Tokenizer = BYTES) -> bool:
    """True if the grammar of a call of `w` allows a text."""
    rules = Rules(tokenizer)
    return allows(rules, notation.one.grammar(rules, "w", schema), text)
