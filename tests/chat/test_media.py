"""Conversations with pictures and sound: prompts, reuse, forks, saved states."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import write_adapter
from llamacli import (
    ChatTemplateError,
    ContextOverflowError,
    DraftModel,
    InvalidRequestError,
    MediaError,
    Model,
    PromptLookup,
    eval_batch,
    load_model,
)
from llamacli.chat.messages import Message
from llamacli.media.encoder import LoadedEncoder, Tile
from llamacli.media.sound import Sound
from llamacli.plugins import Plugins
from llamacli.testing.tiny_media import drawn, tone
from media_cases import CASES, SPECIAL, prompt, write_mmproj, write_text
from sound_cases import CASES as HEARING
from sound_cases import write_hearing

NAMES = ["idefics3", "gemma3", "qwen3vl", *HEARING]


def load(folder: Path, name: str, **options: Any) -> Model:
    case = (CASES | HEARING)[name]
    path = folder / "text.gguf"
    if name in HEARING:
        write_hearing(folder, name)
    elif not path.exists():
        write_text(path, name, typed=name == "idefics3")
        write_mmproj(folder / "mmproj.gguf", name)
    return load_model(path, "fp32", plugins=Plugins.of(case.text, media=[case.encoder]), threads=1, **options)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    with load(tmp_path, request.param) as loaded:
        yield loaded


def contents(model: Model, *seeds: int) -> list[np.ndarray]:
    """Pictures, or sounds, of one size."""
    if model.media_encoder().medium is Sound:
        return [tone(hertz=440.0 + 100 * seed) for seed in seeds]
    return [drawn(40, 30, seed) for seed in seeds]


def media(model: Model, *seeds: int) -> dict[str, list[np.ndarray]]:
    """Pictures, or sounds, as `add_user` takes them."""
    return {"audio" if model.media_encoder().medium is Sound else "images": contents(model, *(seeds or (0,)))}


def reply(chat: Any, max_tokens: int = 5) -> str:
    chat.max_tokens = max_tokens
    return "".join(piece.text for piece in chat.respond())


def encoded(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """Tiles that are encoded from now on, in order."""
    encoder, calls = model.media_encoder(), list[Tile]()
    own = encoder._encoded

    def counted(tile: Tile) -> Any:
        calls.append(tile)
        return own(tile)

    monkeypatch.setattr(encoder, "_encoded", counted)
    return calls


def test_the_picture_decides_the_reply(model: Model) -> None:
    logits = []
    for seed in (0, 0, 3):
        with model.create_chat() as chat:
            chat.add_user("What is it?", **media(model, seed))
            reply(chat)
            logits.append(chat.session.logits)
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


def test_the_same_picture_costs_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = encoded(model, monkeypatch)
    question = "What is it? " * 20
    with model.create_chat() as chat:
        chat.add_user(question, **media(model))
        reply(chat)
        n, n_past = len(calls), chat.session.n_past
        assert n > 0
        chat.add_user("And now?")
        reply(chat)
        assert len(calls) == n
        assert chat.session.n_computed < 2 * n_past
    with model.create_chat() as second:
        second.add_user(question, **media(model))
        reply(second)
        assert len(calls) == n
        assert second.session.n_reused > 0


def test_another_picture_of_the_same_size_is_never_taken_for_it(model: Model) -> None:
    with model.create_chat() as first, model.create_chat() as second:
        first.add_user("What is it?", **media(model, 0))
        reply(first)
        second.add_user("What is it?", **media(model, 1))
        reply(second)
        with model.create_session(reuse=False) as session:
            fresh = model.create_chat(session=session)
            fresh.add_user("What is it?", **media(model, 1))
            reply(fresh)
            np.testing.assert_array_equal(second.session.logits, fresh.session.logits)
            assert second.session.tokens == fresh.session.tokens


def test_one_changed_number_is_another_medium(model: Model) -> None:
    (content,) = contents(model, 0)
    changed = content.copy()
    changed.reshape(-1)[300] += changed.dtype.type(1)
    name = next(iter(media(model)))
    with model.create_chat() as one, model.create_chat() as other:
        one.add_user("x", **{name: [content]})
        other.add_user("x", **{name: [changed]})
        assert one.render_turn() != other.render_turn()


def test_a_fork_and_a_rewind_hold(model: Model) -> None:
    with model.create_chat() as chat:
        chat.add_user("What is it?", **media(model))
        reply(chat)
        fork = copy.copy(chat.session)
        tokens = list(fork.generate("And", max_tokens=3, ignore_eos=True))
        again = list(chat.session.generate("And", max_tokens=3, ignore_eos=True))
        assert [token.id for token in tokens] == [token.id for token in again]
        fork.close()


def test_a_reply_can_be_made_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.create_chat() as chat:
        chat.add_user("What is it?", **media(model))
        first = reply(chat)
        calls = encoded(model, monkeypatch)
        chat.retract()
        assert reply(chat) == first
        chat.history.clear()
        chat.add_user("What is it?", **media(model, 0, 5))
        reply(chat)
        assert calls


def test_a_saved_conversation_goes_on(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.create_chat() as chat, model.create_chat() as loaded:
        chat.add_user("What is it?", **media(model))
        reply(chat)
        chat.save(tmp_path / "chat.state")
        chat.add_user("And now?")
        expected = reply(chat)
        loaded.load(tmp_path / "chat.state")
        (medium,), (content,) = loaded.history[0].media, contents(model, 0)
        np.testing.assert_array_equal(medium.samples if isinstance(medium, Sound) else medium.pixels, content)
        calls = encoded(model, monkeypatch)
        loaded.add_user("And now?")
        n = loaded.session.n_computed
        assert reply(loaded) == expected
        assert not calls
        assert loaded.session.n_computed - n < 60
        np.testing.assert_array_equal(loaded.session.logits, chat.session.logits)


def test_text_that_looks_like_a_marker_stays_text(model: Model) -> None:
    with model.create_chat("[[media 2 0]]") as chat:
        chat.add_user("[[media 0 0]] [[media 1 ", **media(model))
        assert "[[media 0 0]]" in model.decode([token for token in chat.render_turn() if token >= 0])


def test_more_tokens_than_the_context(tmp_path: Path) -> None:
    with load(tmp_path, "idefics3") as model, model.create_session(n_ctx=40) as session:
        chat = model.create_chat(session=session)
        chat.add_user("What is it?", [drawn(40, 30)])
        with pytest.raises(ContextOverflowError):
            chat.respond()
        assert session.n_past == 0


def test_a_model_without_an_encoder(tmp_path: Path) -> None:
    with load(tmp_path, "idefics3") as model, model.create_chat() as chat:
        (tmp_path / "mmproj.gguf").unlink()
        with pytest.raises(MediaError, match="the model 'tiny media idefics3' has no encoder of pictures"):
            chat.add_user("What is it?", [drawn(4, 4)])
        assert not chat.history


def test_the_encoder_of_a_model_with_another_vocabulary(tmp_path: Path) -> None:
    write_text(tmp_path / "text.gguf", "gemma3", special=SPECIAL[:3])
    write_mmproj(tmp_path / "mmproj.gguf", "gemma3")
    with load(tmp_path, "gemma3") as model, model.create_chat() as chat:
        chat.add_user("x", [drawn(4, 4)])
        with pytest.raises(MediaError, match="no token '<start_of_image>', with which the encoder 'tiny gemma3'"):
            chat.respond()


def test_a_single_picture_is_no_list(model: Model) -> None:
    with model.create_chat() as chat, pytest.raises(InvalidRequestError, match="put a single one into a list"):
        chat.add_user("x", "photo.jpg")


def test_a_template_that_leaves_the_picture_out(tmp_path: Path) -> None:
    with load(tmp_path, "idefics3") as model:
        chat = model.create_chat(template="{% for m in messages %}{{ m['role'] }}{% endfor %}<bos>")
        chat.add_user("x", [drawn(32, 32)])
        with pytest.raises(ChatTemplateError, match="leaves out a picture"):
            chat.respond()


def test_messages_of_text_alone_reach_a_template_of_parts(tmp_path: Path) -> None:
    with load(tmp_path, "idefics3") as model, model.create_chat("Be brief.") as chat:
        chat.add_user("Hello there")
        text = model.decode(chat.render_turn())
        assert "Be brief." in text
        assert "user: Hello there" in text


def test_pictures_of_a_message_survive_its_dictionary() -> None:
    from llamacli.media.pictures import Picture

    message = Message("user", "x", images=(Picture.of(drawn(9, 7)),))
    back = Message.from_dict(message.as_dict())
    np.testing.assert_array_equal(back.images[0].pixels, drawn(9, 7))
    with pytest.raises(InvalidRequestError):
        Message.from_dict({**message.as_dict(), "images": ["!!"]})


def test_an_encoder_serves_several_threads(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with load(tmp_path, "gemma3") as model, ThreadPoolExecutor(4) as pool:
        encoder: LoadedEncoder = model.media_encoder()
        alone = []
        for seed in range(4):
            chat = model.create_chat()
            chat.add_user("x", [drawn(30, 30, seed)])
            alone.append(reply(chat))

        def ask(seed: int) -> str:
            with model.create_chat() as chat:
                chat.add_user("x", [drawn(30, 30, seed)])
                return reply(chat)

        encoder._kept.clear()
        assert list(pool.map(ask, range(4))) == alone


@pytest.mark.parametrize("kind", ["lookup", "draft"])
@pytest.mark.parametrize("name", ["idefics3", "qwen3a"])
def test_speculation_changes_no_text(tmp_path: Path, name: str, kind: str) -> None:
    with load(tmp_path, name) as model, load(tmp_path, name) as smaller:
        plain, speculative = model.create_chat(), model.create_chat()
        drafter = PromptLookup() if kind == "lookup" else DraftModel(smaller, 4)
        texts = []
        for chat, given in ((plain, None), (speculative, drafter)):
            chat.max_tokens = 12
            chat.add_user("What is it? What is it?", **media(model))
            texts.append("".join(piece.text for piece in chat.respond(speculate=given)))
        assert texts[0] == texts[1]
        np.testing.assert_array_equal(plain.session.logits, speculative.session.logits)
        plain.close()
        speculative.close()


@pytest.mark.parametrize("name", ["idefics3", "qwen3a"])
def test_adapters_with_media(tmp_path: Path, name: str) -> None:
    """Cells of a medium are shared by equal adapters only."""
    with load(tmp_path, name):
        pass
    lora = write_adapter(tmp_path / "lora.gguf", tmp_path / "text.gguf", chosen=lambda tensor: "attn_q.w" in tensor)
    logits = []
    with load(tmp_path, name) as model:
        adapter = model.load_adapter(lora)
        for scale in (1.0, 0.0, 1.0):
            with model.create_session(adapters=[(adapter, scale)]) as session:
                chat = model.create_chat(session=session)
                chat.add_user("What is it?", **media(model))
                reply(chat)
                logits.append(session.logits)
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("name", ["idefics3", "qwen3a"])
def test_batches_with_media(tmp_path: Path, name: str) -> None:
    with load(tmp_path, name) as model:
        inputs = [prompt(model, "Look: ", model.media_encoder().medium.of(one), " x") for one in contents(model, 0, 1)]
        alone = []
        for one in inputs:
            with model.create_session(reuse=False) as session:
                session.eval(one)
                alone.append(session.logits)
        with model.create_session(reuse=False) as first, model.create_session(reuse=False) as second:
            eval_batch([(first, inputs[0]), (second, inputs[1])])
            for expected, session in zip(alone, (first, second), strict=True):
                np.testing.assert_array_equal(session.logits, expected)
