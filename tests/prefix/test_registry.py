import pytest

from conftest import LoadTiny
from llamacli import Model
from llamacli.prefix import (
    PrefixSession,
    SessionUnavailableError,
    embed,
    embed_available,
    new_session,
    registry,
    session_available,
    set_embed_function,
    set_session_factory,
)
from prefix_helpers import CONFIG


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_session_factory", "_embed_function"):
        monkeypatch.setattr(registry, name, getattr(registry, name))


def test_session_factory_can_be_replaced_and_removed(model: Model) -> None:
    assert session_available()
    set_session_factory(lambda path, config: PrefixSession(model, config))
    assert new_session("any", CONFIG).config is CONFIG
    set_session_factory(None)
    assert not session_available()
    with pytest.raises(SessionUnavailableError, match="factory"):
        new_session("any")


def test_embed_function_can_be_replaced_and_removed() -> None:
    assert embed_available()
    set_embed_function(lambda path, config, text: [len(text)])
    assert embed("any", "abc") == [3]
    set_embed_function(None)
    assert not embed_available()
    with pytest.raises(SessionUnavailableError, match="embedding"):
        embed("any", "abc")
