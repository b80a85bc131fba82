"""Conversations of random tokens, cut and retracted, with messages that change."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llamacli import ChatSession, Model, Session
from llamacli.chat.context import plan
from llamacli.chat.messages import Message
from suite import examples

N_VOCAB = 365
BYTES = [3 + byte for byte in "é🦊".encode()]  # most replies of these have unfinished characters

TOKENS = st.sampled_from(BYTES) | st.integers(0, N_VOCAB - 1)
TEXTS = st.sampled_from(["", "once", "the dog", "é", "<|im_end|>"])
CHANGES = st.sampled_from(["say", "say instead", "retract", "edit", "system", "clear"])
STEPS = st.lists(st.tuples(CHANGES, TEXTS, st.lists(TOKENS, max_size=5), st.integers(0, 6)), max_size=8)


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


@pytest.fixture
def model(talker: Callable[..., Model]) -> Model:
    return talker()


@given(steps=STEPS)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_are_those_of_the_messages(steps, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.config.n_vocab == N_VOCAB
    with model.create_chat() as chat:
        for what, text, reply, max_tokens in steps:
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
            list(chat.respond())
            held = [token for part in chat._held for token in part.ids]
            assert tuple(held) == chat.session.tokens


def spelled(model: Model, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, unparse_special=True)
