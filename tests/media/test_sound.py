"""Decoding of sound, resampling, and spectrograms."""

import contextlib
import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llamacli import MediaError
from llamacli.media import sound
from llamacli.media.files import data_of_base64
from llamacli.media.sound import SAMPLE_RATE, Sound, log_mel, resampled
from llamacli.testing.tiny_media import tone
from sound_cases import wav


def encoded(samples: np.ndarray, kind: int, bits: int, rate: int = SAMPLE_RATE, *, extensible: bool = False) -> bytes:
    """WAV file of samples [n, channels] from -1 to 1."""
    if kind == 3:
        data = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    else:
        numbers = np.round(samples * (2.0 ** (bits - 1) - 1)).astype("<i8")
        data = numbers.reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()
    channels, width = samples.shape[1], samples.shape[1] * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * width, width, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    body = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


@pytest.mark.parametrize(
    ("kind", "bits", "error"),
    [(1, 8, 0.009), (1, 16, 7e-5), (1, 24, 3e-7), (1, 32, 1e-7), (3, 32, 0), (3, 64, 0)],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files(tmp_path: Path, kind: int, bits: int, error: float, channels: int) -> None:
    samples = np.stack([tone(0.05), tone(0.05, 700)][:channels], 1)
    path = tmp_path / "sound.wav"
    path.write_bytes(encoded(samples, kind, bits, extensible=bits == 24))
    for given in (path, str(path), path.read_bytes()):
        found = Sound.of(given)
        np.testing.assert_allclose(found.samples, samples.mean(1), atol=error)
        assert found.source == path.read_bytes()


def test_arrays_and_what_is_kept_of_them() -> None:
    found = Sound.of(tone(0.05).astype(np.float64))
    np.testing.assert_array_equal(found.samples, tone(0.05))
    np.testing.assert_array_equal(Sound.of(found.source).samples, found.samples)
    assert Sound.of(found) is found


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_a_tone_keeps_its_pitch_at_other_rates(rate: int) -> None:
    def of(rate: int) -> np.ndarray:
        return np.sin(2 * np.pi * 440 * np.arange(rate // 4) / rate).astype(np.float32)

    found = Sound.of(wav(of(rate), rate)).samples
    assert len(found) == SAMPLE_RATE // 4
    np.testing.assert_allclose(found[400:-400], of(SAMPLE_RATE)[400:-400], atol=2e-4)


def test_what_is_above_the_new_rate_is_left_out() -> None:
    high = np.sin(2 * np.pi * 12_000 * np.arange(4800) / 48_000).astype(np.float32)
    assert np.abs(resampled(high, 48_000)[50:-50]).max() < 1e-3


WAV = wav(tone(0.05))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (WAV[:500], r"the sound is damaged: 1144 bytes of its samples are missing"),
        (WAV[:30], r"its format is cut|it has no samples"),
        (WAV[:40], "the sound is damaged: it has no samples"),
        (wav(tone(0)), "the sound: sound of 0 seconds is empty"),
        (b"", "the sound is no sound of a known type: WAV, FLAC, Ogg or MP3"),
        (b"\x89PNG\r\n\x1a\n", "no sound of a known type"),
        (encoded(tone(0.01)[:, None], 1, 16, 500), "1 channels at 500 Hz; up to 16 at 1000 to 192000 Hz are read"),
        (encoded(tone(0.01)[:, None], 1, 16, 0), "1 channels at 0 Hz"),
        (encoded(np.zeros((9, 64), np.float32), 1, 16), "64 channels at 16000 Hz"),
        (encoded(np.zeros((9, 0), np.float32), 1, 16), "0 channels at 16000 Hz"),
        (WAV[:40] + b"\xfe\xff\xff\xff" + WAV[44:], r"4294965694 bytes of its samples are missing"),
        (encoded(tone(0.01)[:, None], 7, 8), "samples of format 7 with 8 bits are not read"),
        (encoded(np.full((9, 1), np.nan), 3, 32), "its samples are not finite"),
        (encoded(np.full((9, 1), 1e300), 3, 64), "its samples are not finite"),
        (np.full(9, 1e300), "its samples are not finite"),
        (np.zeros((4, 2), np.float32), r"an array of sound is floats \[n\], not float32 \[4, 2\]"),
        (np.zeros(4, np.int16), "not int16"),
        (np.zeros(0, np.float32), "the array: sound of 0 seconds is empty"),
        (7, "sound is a path, bytes of a file or an array, not int"),
        ("none.wav", "none.wav: no such file"),
    ],
)
def test_bad_input(given: object, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        Sound.of(given)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "MAX_SECONDS", 1)
    with pytest.raises(MediaError, match="it is longer than the 1 seconds of sound that are read"):
        Sound.of(wav(tone(1.5, rate=48_000), 48_000))
    with monkeypatch.context() as patched:
        patched.setattr(sound, "MAX_SAMPLES", 500)
        with pytest.raises(MediaError, match="it has more than the 500 samples of sound that are read"):
            Sound.of(WAV)
    monkeypatch.setattr(sound, "MAX_BYTES", 100)
    with pytest.raises(MediaError, match="1644 bytes are more than the 100 of sound"):
        Sound.of(WAV)


def test_other_types_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MediaError, match=r"other types need soundfile: pip install 'llamacli\[audio\]'"):
        Sound.of(b"fLaC" + bytes(100))


@pytest.mark.parametrize(
    ("form", "kind", "lag"),
    [("FLAC", "PCM_16", 0), ("OGG", "VORBIS", 0), ("OGG", "OPUS", 36), ("MP3", "MPEG_LAYER_III", 0)],
)
def test_types_of_the_library(form: str, kind: str, lag: int) -> None:
    """libsndfile drops the first 2.25 ms of Opus."""
    soundfile = pytest.importorskip("soundfile")
    file, samples = io.BytesIO(), tone(0.5, rate=48_000)
    soundfile.write(file, samples, 48_000, format=form, subtype=kind)
    expected = Sound.of(wav(samples, 48_000)).samples[lag:]
    assert np.corrcoef(Sound.of(file.getvalue()).samples[: len(expected)], expected)[0, 1] > 0.99
    with pytest.raises(MediaError, match="the sound is damaged"):
        Sound.of(file.getvalue()[:4] + bytes(100))


def test_a_bomb_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file whose channels are many floats is averaged in blocks."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros((3_000_000, 8), np.int16), 192_000, format="FLAC")
    assert len(file.getvalue()) < 200_000
    tracemalloc.start()
    assert len(Sound.of(file.getvalue()).samples) == 250_000
    assert tracemalloc.get_traced_memory()[1] < 75_000_000  # 96 MB are all channels
    tracemalloc.stop()
    monkeypatch.setattr(sound, "MAX_SAMPLES", 500_000)
    with pytest.raises(MediaError, match="more than the 500000 samples"):
        Sound.of(file.getvalue())


def test_a_file_cut_anywhere() -> None:
    for stop in range(0, len(WAV), 7):
        with pytest.raises(MediaError):
            Sound.of(WAV[:stop])


def test_flipped_bytes_raise_nothing_else() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        data = bytearray(WAV[:200] + WAV[44:144])
        data[random.randint(0, 60)] = random.randint(0, 256)
        with contextlib.suppress(MediaError):
            assert np.isfinite(Sound.of(bytes(data)).samples).all()


def test_base64() -> None:
    assert data_of_base64("YWJj", 6, "sound") == b"abc"
    with pytest.raises(MediaError, match="its data is not base64"):
        data_of_base64("a b", 6, "sound")
    with pytest.raises(MediaError, match="12 bytes are more than the 6 of sound"):
        data_of_base64("YWJj" * 4, 6, "sound")


def test_frames_of_the_spectrogram() -> None:
    mel = log_mel(tone(0.5, 440), 80)
    assert mel.shape == (50, 80)
    assert mel.dtype == np.float32
    assert mel.max() - mel.min() <= 2  # what is 8 below the maximum is cut, and divided by 4
    loud = log_mel(tone(0.5, 1000), 80)[25].argmax()
    assert mel[25].argmax() < loud
    assert log_mel(tone(0.001), 80).shape == (0, 80)
