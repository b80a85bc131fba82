"""Settings of speculative decoding in the chat at the terminal."""

from collections.abc import Iterator

import pytest

from conftest import LoadTiny
from llamacli import ChatSession, DraftModel, InvalidRequestError, PromptLookup, SamplingParams
from llamacli.cli.repl_settings import Settings
from llamacli.testing.chats import CHATML


@pytest.fixture
def chat(load_tiny: LoadTiny) -> Iterator[ChatSession]:
    with load_tiny("gqa", tokenizer="spm") as model, model.create_chat(template=CHATML) as chat:
        yield chat


def settings_of(chat: ChatSession) -> Settings:
    return Settings(chat, SamplingParams(), seed=1, verbose=False, log=False)


def test_lookup_is_turned_on_and_off(chat: ChatSession) -> None:
    settings = settings_of(chat)
    assert settings.values()["lookup"] == "off"
    settings.set("draft_max 4")
    settings.set("lookup")
    assert isinstance(chat.session.drafter, PromptLookup)
    assert chat.session.drafter.max_tokens == 4
    assert (settings.values()["lookup"], settings.values()["draft_max"]) == ("on", "4")
    settings.set("draft_max 5")
    assert chat.session.drafter.max_tokens == 5
    settings.set("lookup off")
    assert chat.session.drafter is None


def test_the_length_of_a_draft_model_is_set(chat: ChatSession) -> None:
    with DraftModel(chat.model) as drafter:
        chat.session.drafter = drafter
        settings_of(chat).set("draft_max 7")
        assert chat.session.drafter is drafter
        assert drafter.max_tokens == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lookup maybe", "/set lookup takes on or off, not 'maybe'"),
        ("draft_max 0", "/set draft_max takes 1 to 256, not 0"),
        ("draft_max x", "/set draft_max takes an integer, not 'x'"),
        ("draft small.gguf", "start llamacli run with --draft FILE"),
    ],
)
def test_wrong_values_are_refused(chat: ChatSession, line: str, message: str) -> None:
    settings = settings_of(chat)
    with pytest.raises(InvalidRequestError, match=message):
        settings.set(line)
    assert chat.session.drafter is None
    assert settings.values()["draft_max"] == "16"


def test_lookup_stays_on_with_another_model(chat: ChatSession, load_tiny: LoadTiny) -> None:
    settings = settings_of(chat)
    settings.set("lookup on")
    with chat.model.create_chat(template=CHATML) as other:
        settings.use(other, SamplingParams())
        assert isinstance(other.session.drafter, PromptLookup)
