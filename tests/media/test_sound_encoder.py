"""Encoders of sound compared with transformers, and sessions that hear."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llamacli import ContextOverflowError, MediaError, Model, ModelFormatError, load_model
from llamacli.engine import Engine, QuantMode, ReferenceEngine, default_engine
from llamacli.errors import PluginError
from llamacli.gguf import open_gguf
from llamacli.media.encoder import LoadedEncoder, Tile, compile_encoder
from llamacli.media.sound import Sound, log_mel
from llamacli.plugins import Plugins
from llamacli.testing.tiny_media import AUDIO, tone
from media_cases import prompt
from oracle.goldens import DIRECTORY, nmse, sha256
from oracle.media import AFTER, BEFORE, N_CTX, thinned
from oracle.sound import N_FRAMES, N_ROWS
from sound_cases import CASES, PEER_CASES, PEER_SOUNDS, SOUNDS, wav, write_hearing

GOLDEN, PEER = np.load(DIRECTORY / "sound.npz"), np.load(DIRECTORY / "media.npz")
PEER_BOUNDS = {"peer voxtral": 3e-7, "peer qwen3a": 5e-10}
"""Bounds of the NMSE of rows and logits: llama.cpp computes Voxtral's convolutions in float16."""


def encoder_of(folder: Path, name: str, engine: Engine | None = None) -> LoadedEncoder:
    path = folder / "mmproj-text.gguf"
    if not path.exists():
        write_hearing(folder, name)
    with closing(open_gguf(path)) as file:
        return compile_encoder(CASES[name].encoder, file, QuantMode.FP32, engine or default_engine(1))


def tiles(encoder: LoadedEncoder, samples: np.ndarray) -> list[Tile]:
    return [part for part in encoder.layout(Sound.of(samples)) if isinstance(part, Tile)]


def rows(encoder: LoadedEncoder, samples: np.ndarray) -> np.ndarray:
    return np.concatenate([encoder.encode(tile) for tile in tiles(encoder, samples)])


def load(folder: Path, name: str, **options: object) -> Model:
    write_hearing(folder, name)
    case = (CASES | PEER_CASES)[name]
    plugins = Plugins.of(case.text, media=[case.encoder])
    return load_model(folder / "text.gguf", "fp32", plugins=plugins, threads=1, **options)


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_transformers(tmp_path: Path, name: str, sound: str) -> None:
    with closing(encoder_of(tmp_path, name)) as encoder:
        assert sha256(tmp_path / "mmproj-text.gguf") == str(GOLDEN[f"{name} sha256"])
        assert nmse(GOLDEN[f"{name} {sound} rows"], rows(encoder, SOUNDS[sound])[::N_ROWS]) < 1e-11


@pytest.mark.parametrize("sound", SOUNDS)
def test_frames_are_those_of_transformers(sound: str) -> None:
    samples = SOUNDS[sound]
    for name, n in (("voxtral", len(samples) + -len(samples) % 480_000), ("qwen3a", max(8000, len(samples)))):
        mel = log_mel(np.pad(samples, (0, n - len(samples))), AUDIO["num_mel_bins"])
        np.testing.assert_allclose(mel[::N_FRAMES], GOLDEN[f"{name} {sound} mel"], atol=1e-5)


@pytest.mark.parametrize("sound", PEER_SOUNDS)
@pytest.mark.parametrize("name", PEER_CASES)
def test_rows_and_logits_are_those_of_the_peer(tmp_path: Path, name: str, sound: str) -> None:
    with load(tmp_path, name) as model:
        assert sha256(tmp_path / "mmproj-text.gguf") == str(PEER[f"{name} sha256"])
        assert sha256(tmp_path / "text.gguf") == str(PEER[f"{name} text sha256"])
        inputs = prompt(model, BEFORE, Sound.of(PEER_SOUNDS[sound]), AFTER)
        ids = inputs.ids.copy()
        ids[inputs.rows] = -1
        np.testing.assert_array_equal(ids, PEER[f"{name} {sound} ids"])
        found = thinned(sound, rows(model.media_encoder(), PEER_SOUNDS[sound]))
        assert nmse(PEER[f"{name} {sound} rows"], found) < PEER_BOUNDS[name]
        with model.create_session(n_ctx=N_CTX) as session:
            logits = session.eval(inputs, all_logits=True)
        assert logits is not None
        expected = PEER[f"{name} {sound} logits"]
        assert nmse(expected, logits[-len(expected) :]) < PEER_BOUNDS[name]


def test_the_reference_engine(tmp_path: Path) -> None:
    with closing(encoder_of(tmp_path, "qwen3a", ReferenceEngine())) as encoder:
        assert nmse(GOLDEN["qwen3a seconds rows"], rows(encoder, SOUNDS["seconds"])[::N_ROWS]) < 1e-11


def test_threads_and_pieces_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = SOUNDS["seconds"]
    with closing(encoder_of(tmp_path, "qwen3a")) as encoder:
        expected = rows(encoder, samples)
    with closing(encoder_of(tmp_path, "qwen3a", default_engine(2))) as encoder:
        np.testing.assert_array_equal(rows(encoder, samples), expected)
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1.0)
    monkeypatch.setattr("llamacli.engine.native._PIECE_ROWS", 5)
    with closing(encoder_of(tmp_path, "qwen3a")) as encoder:
        (tile,) = tiles(encoder, samples)
        assert sum(1 for _ in encoder.encode_in_pieces(tile)) > 50
        np.testing.assert_array_equal(encoder.encode(tile), expected)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    with load(tmp_path, "qwen3a") as loaded:
        yield loaded


def reply(model: Model, *audio: object, text: str = "What?") -> tuple[list[int], int]:
    with model.create_chat(max_tokens=4) as chat:
        chat.add_user(text, audio=audio)
        for _ in chat.respond():
            pass
        return list(chat.session.tokens), chat.session.stats.n_prompt


def test_a_chat_hears(model: Model) -> None:
    without, (one, n), (again, n_again), (other, n_other) = (
        reply(model),
        reply(model, tone()),
        reply(model, wav(tone())),
        reply(model, tone(hertz=700)),
    )
    assert len(one) == len(without[0]) + 8 + 2  # 60 frames are 8 rows, between two tokens
    assert len(one) == len(other)
    assert reply(model, tone())[0] == one
    assert [n, n_other] == [n, n]
    assert one[:20] != other[:20]  # by their content keys, as of 16 bits are
    assert one[:20] != again[:20]
    assert n_again == n


def test_the_same_sound_costs_nothing_in_a_chat(model: Model) -> None:
    with model.create_chat(max_tokens=2) as chat:
        n_prompt = []
        for audio in ([tone()], []):
            chat.add_user("What?", audio=audio)
            for _ in chat.respond():
                pass
            n_prompt.append(chat.session.stats.n_prompt)
        assert n_prompt[1] - n_prompt[0] < 12 < n_prompt[0]
        history = [message.as_dict() for message in chat.history]
        assert history[0]["audio"]
        assert type(chat.history[0]).from_dict(history[0]).audio[0].samples.tolist() == tone().tolist()


def test_what_is_refused(tmp_path: Path, model: Model) -> None:
    with model.create_chat() as chat:
        with pytest.raises(
            MediaError, match="the encoder 'tiny qwen3a' is one of sound: the model has no encoder of pic"
        ):
            chat.add_user("x", images=[np.zeros((8, 8), np.uint8)])
        with pytest.raises(Exception, match="audio is a list of sounds: put a single one into a list"):
            chat.add_user("x", audio="sound.wav")
    with model.create_chat(session=model.create_session(n_ctx=64)) as chat:
        chat.add_user("x", audio=[tone(8)])
        with pytest.raises(ContextOverflowError):
            list(chat.respond())
    with pytest.raises(PluginError, match=r"made a tile \(12, 16\), which has no whole tokens"):
        CASES["qwen3a"].encoder.size(np.zeros((12, 16), np.float32), model.media_encoder().config)
    with load(tmp_path, "qwen3a", mmproj=tmp_path / "mmproj-text.gguf") as found:
        assert found.media_encoder().projector == "qwen3a"
    (tmp_path / "mmproj-text.gguf").unlink()
    with (
        load_model(tmp_path / "text.gguf", plugins=Plugins.of(CASES["qwen3a"].text), threads=1) as deaf,
        deaf.create_chat() as chat,
        pytest.raises(MediaError, match="has no encoder of pictures or sound"),
    ):
        chat.add_user("x", audio=[tone()])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip.has_audio_encoder": False}, "clip.has_audio_encoder = false: it has no encoder of sound"),
        ({"clip.audio.projection_dim": 32}, "mm.a.mlp.2"),
        ({"clip.audio.attention.head_count": 5}, "clip.audio.embedding_length = 48 is not a multiple"),
        ({"clip.audio.num_mel_bins": 0}, "clip.audio.num_mel_bins"),
        ({"clip.audio.embedding_length": 40, "clip.audio.attention.head_count": 4}, "a.conv_out"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, wrong: dict[str, object], message: str) -> None:
    write_hearing(tmp_path, "qwen3a", **wrong)
    with pytest.raises(ModelFormatError, match=message):
        encoder_of(tmp_path, "qwen3a")
