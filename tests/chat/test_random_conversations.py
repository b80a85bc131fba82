"""Conversations of random tokens, cut and retracted, with messages that change."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import byte_tokens
from llamacli import ChatSession, Model, Session
from llamacli.chat.context import plan
from llamacli.chat.messages import Message
from suite import examples

N_VOCAB = 365
BYTES = [3 + byte for byte in "é🦊".encode()]  # most replies of these have unfinished characters

TOKENS = st.sampled_from(BYTES) | st.sampled_from([256, 257]) | st.integers(0, N_VOCAB - 1)
REPLIES = st.tuples(st.lists(TOKENS, max_size=4), st.sampled_from([6, 6, 0, 1, 2, 3]), st.sampled_from([9, 9, 0, 1, 2]))
TEXTS = st.sampled_from(["", "once", "the dog", "é", "<|im_end|>"])
CHANGES = st.sampled_from(["say", "say instead", "retract", "edit", "system", "clear"])
STEPS = st.lists(st.tuples(CHANGES, TEXTS, REPLIES), min_size=2, max_size=8)


def change(chat: ChatSession, what: str, text: str) -> None:
    match what:
        case "say":
            chat.add_user(text)
        case "say instead":
            chat.retract()
            chat.add_user(text)
        case "retract":
            chat.retract()
        case "edit" if chat.history:
            chat.history[0] = Message(chat.history[0].role, text)
        case "system":
            chat.system = text
        case "clear":
            chat.clear()


@pytest.fixture(params=["bytes alone", "bytes with text"])
def model(request: pytest.FixtureRequest, talker: Callable[..., Model]) -> Model:
    """Models with tokens of single bytes, and of text and bytes."""
    if request.param == "bytes alone":
        return talker()
    keys = byte_tokens.byte_keys(N_VOCAB)
    return talker(**{name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()})


@given(steps=STEPS)
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_are_those_of_the_messages(steps, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.config.n_vocab == N_VOCAB
    with model.create_chat() as chat:
        for what, text, (reply, max_tokens, n_pieces) in steps:
            change(chat, what, text)
            if not chat.pending:
                continue
            planned, rendering = chat._plan_reply()
            afresh = plan([], rendering.parts, chat.template.encode).ids
            assert spelled(model, planned.ids) == spelled(model, afresh)
            if all(message.role == "user" for message in chat.history):
                assert planned.ids == afresh
            ids = iter([*reply, *[model.tokenizer.eos_id] * 2])
            monkeypatch.setattr(Session, "draw", lambda _self, _params, ids=ids: next(ids))
            chat.max_tokens = max_tokens
            pieces = chat.respond()
            list(itertools.islice(pieces, n_pieces))
            pieces.close()
            held = [token for part in chat._held for token in part.ids]
            assert tuple(held) == chat.session.tokens


def spelled(model: Model, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, unparse_special=True)
