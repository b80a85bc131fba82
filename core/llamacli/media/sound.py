"""Sound: decoding of WAV files within limits, resampling, and mel spectrograms.

The spectrograms are Whisper's (Radford et al. 2022, arXiv:2212.04356).
"""

from __future__ import annotations

import functools
import io
import math
import struct
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import MediaError
from llamacli.media.files import read_media

Samples = npt.NDArray[np.float32]
"""Samples of one channel, float32 [n] from -1 to 1."""

Mel = npt.NDArray[np.float32]
"""Frames of a mel spectrogram, float32 [n_frames, n_mel]."""

SAMPLE_RATE = 16_000
"""Samples a second that encoders hear."""

HOP, N_FFT = 160, 400
"""Samples between two frames, and of a frame."""

MAX_BYTES = 64 << 20
"""Largest file of sound, in bytes."""

MAX_SECONDS = 1800
"""Longest sound that is decoded."""

MAX_SAMPLES = MAX_SECONDS * 48_000
"""Most samples of a channel that are decoded, whatever their rate."""

_MAX_RATE, _MIN_RATE, _MAX_CHANNELS = 192_000, 1_000, 16
_BLOCK = 1 << 16  # samples of each channel that are decoded at a time
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MEL_FLOOR = 1e-10
_HALF = 16  # zero crossings of the resampling filter on each side


@attrs.frozen(eq=False)
class Sound:
    """Sound, decoded: `samples`, float32 [n] at `SAMPLE_RATE`.

    `source` is the content of its file, or a WAV file of it.
    """

    samples: Samples
    source: bytes = attrs.field(repr=False)

    @classmethod
    def of(cls, given: object) -> Sound:
        """Sound of a file, its bytes, or an array.

        WAV files have PCM of 8 to 32 bits or floats; FLAC, Ogg and MP3 need soundfile, the extra `audio`. Channels are
        averaged, other rates resampled. Arrays are floats [n] at `SAMPLE_RATE`. Raises MediaError for a file that
        cannot be read, is cut or of another type, one beyond `MAX_BYTES`, `MAX_SECONDS` or `MAX_SAMPLES`, and for
        anything else.
        """
        if isinstance(given, Sound):
            return given
        if isinstance(given, np.ndarray):
            if given.ndim != 1 or given.dtype.kind != "f":
                raise MediaError(f"an array of sound is floats [n], not {given.dtype} {list(given.shape)}")
            samples = _checked(_float32(given), SAMPLE_RATE, "the array")
            return cls(samples, _wav(samples))
        name, source = read_media(given, MAX_BYTES, "sound", "a path, bytes of a file or an array")
        return cls(_decoded(source, name), source)


def log_mel(samples: Samples, n_mel: int) -> Mel:
    """Log-mel spectrogram of frames every `HOP` samples, float32 [n // HOP, n_mel].

    As Whisper's feature extractor makes it: the samples are mirrored at both ends, what is 8 below the maximum is cut.
    """
    padded = np.pad(samples, N_FFT // 2, mode="reflect" if len(samples) > 1 else "edge")
    frames = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP][: len(samples) // HOP]
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(N_FFT) / N_FFT))
    out, filters = np.empty((len(frames), n_mel), np.float32), _filters(n_mel)
    for start in range(0, len(frames), 1000):
        spectrum = np.fft.rfft(frames[start : start + 1000] * window)
        power = (spectrum.real**2 + spectrum.imag**2) @ filters.T
        out[start : start + 1000] = np.log10(np.maximum(power, _MEL_FLOOR))
    return (np.maximum(out, out.max(initial=-np.inf) - np.float32(8)) + np.float32(4)) / np.float32(4)


@functools.cache
def _filters(n_mel: int) -> npt.NDArray[np.float64]:
    """Triangles of Slaney's mel scale with equal areas, [n_mel, N_FFT / 2 + 1]."""
    step, first = np.log(6.4) / 27.0, 15.0
    top = first + np.log(SAMPLE_RATE / 2 / 1000.0) / step
    points = np.linspace(0.0, top, n_mel + 2)
    hertz = np.where(points < first, points * 200.0 / 3, 1000.0 * np.exp((points - first) * step))
    bins = np.arange(N_FFT // 2 + 1) * (SAMPLE_RATE / N_FFT)
    left, centre, right = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    rise, fall = (bins - left) / (centre - left), (right - bins) / (right - centre)
    triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rise, fall)) * (2.0 / (right - left))
    return triangles


def resampled(samples: npt.NDArray[Any], rate: int) -> Samples:
    """Samples at `SAMPLE_RATE` of samples at another rate.

    By a windowed sinc filter.
    """
    if rate == SAMPLE_RATE:
        return samples.astype(np.float32)
    divisor = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // divisor, rate // divisor
    cutoff = min(1.0, up / down)
    half = math.ceil(_HALF / cutoff)
    n = -(len(samples) * up // -down)
    padded = np.pad(samples, half + 1)
    places = np.arange(n, dtype=np.int64) * down
    whole, phases = places // up, places % up
    out, taps = np.empty(n, np.float32), np.arange(-half, half + 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    for phase in range(min(up, n)):
        at = np.arange(phase, n, up)
        distance = taps - phases[phase] / up
        kernel = cutoff * np.sinc(cutoff * distance) * np.cos(np.pi * np.clip(distance / (half + 1), -0.5, 0.5)) ** 2
        for start in range(0, len(at), 4096):
            some = at[start : start + 4096]
            out[some] = windows[whole[some] + 1] @ (kernel / kernel.sum())  # in float64
    return out


def _decoded(source: bytes, name: str) -> Samples:
    if source[:4] not in (b"RIFF", b"RF64") or source[8:12] != b"WAVE":
        return _decoded_by_soundfile(source, name)
    form, at = None, 12
    while at + 8 <= len(source):
        kind, size = source[at : at + 4], struct.unpack_from("<I", source, at + 4)[0]
        at += 8
        if kind == b"fmt ":
            if size < 16 or at + size > len(source):
                raise MediaError(f"{name} is damaged: its format is cut")
            form = struct.unpack_from("<HHIIHH", source, at)
            if form[0] == _EXTENSIBLE and size >= 26:
                form = (*struct.unpack_from("<H", source, at + 24), *form[1:])
        elif kind == b"data":
            if form is None:
                raise MediaError(f"{name} is damaged: its format is missing")
            if size == 0xFFFFFFFF:  # of a stream, whose length was not known
                size = len(source) - at
            if at + size > len(source):
                raise MediaError(f"{name} is damaged: {at + size - len(source)} bytes of its samples are missing")
            return _samples_of(source[at : at + size], form, name)
        at += size + size % 2
    raise MediaError(f"{name} is damaged: it has no samples")


def _decoded_by_soundfile(source: bytes, name: str) -> Samples:
    if not source.startswith((b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")):
        raise MediaError(f"{name} is no sound of a known type: WAV, FLAC, Ogg or MP3")
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library libsndfile
        raise MediaError(
            f"{name} is no WAV file; other types need soundfile: pip install 'llamacli[audio]' ({error})"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(source)) as file:
            _expect_form(file.channels, file.samplerate, name)
            rate, n, parts = file.samplerate, 0, [np.empty(0, np.float32)]
            # All channels of a small file may be gigabytes, and what its header says is not to be relied on.
            while n <= _most(rate) and len(block := file.read(_BLOCK, "float32", always_2d=True)):
                parts.append(block.mean(1, dtype=np.float32))
                n += len(block)
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        raise MediaError(f"{name} is damaged: {str(error).rpartition('>: ')[2][:120]}") from None
    return resampled(_checked(np.concatenate(parts), rate, name), rate)


def _samples_of(data: bytes, form: tuple[int, ...], name: str) -> Samples:
    kind, channels, rate, _, _, bits = form
    if (kind, bits) not in _READERS:
        raise MediaError(f"{name}: samples of format {kind} with {bits} bits are not read; save it as PCM of 16 bits")
    _expect_form(channels, rate, name)
    width = channels * bits // 8
    n = min(len(data) // width, _most(rate) + 1)
    return _mono(_READERS[kind, bits](data[: n * width]).reshape(-1, channels), rate, name)


def _expect_form(channels: int, rate: int, name: str) -> None:
    if not _MIN_RATE <= rate <= _MAX_RATE or not 0 < channels <= _MAX_CHANNELS:
        raise MediaError(
            f"{name}: {channels} channels at {rate} Hz; up to {_MAX_CHANNELS} at {_MIN_RATE} to {_MAX_RATE} Hz are read"
        )


def _mono(samples: npt.NDArray[np.float32], rate: int, name: str) -> Samples:
    """Mean of the channels of samples [n, channels] at `SAMPLE_RATE`."""
    return resampled(_checked(samples.mean(1, dtype=np.float32), rate, name), rate)


def _most(rate: int) -> int:
    """Most samples of a channel."""
    return min(MAX_SECONDS * rate, MAX_SAMPLES)


def _checked(samples: Samples, rate: int, name: str) -> Samples:
    if not len(samples):
        raise MediaError(f"{name}: sound of 0 seconds is empty")
    if len(samples) > MAX_SAMPLES:
        raise MediaError(f"{name}: it has more than the {MAX_SAMPLES} samples of sound that are read")
    if len(samples) > MAX_SECONDS * rate:
        raise MediaError(f"{name}: it is longer than the {MAX_SECONDS} seconds of sound that are read")
    if not np.isfinite(samples).all():
        raise MediaError(f"{name}: its samples are not finite")
    return samples


def _float32(samples: npt.NDArray[Any]) -> Samples:
    with np.errstate(over="ignore"):  # what is not finite is refused
        return samples.astype(np.float32)


def _pcm24(data: bytes) -> Samples:
    parts = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
    whole = parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24
    return (whole / np.float64(1 << 31)).astype(np.float32)


_READERS: dict[tuple[int, int], Callable[[bytes], npt.NDArray[Any]]] = {
    (_PCM, 8): lambda data: (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128,
    (_PCM, 16): lambda data: np.frombuffer(data, "<i2").astype(np.float32) / 32768,
    (_PCM, 24): _pcm24,
    (_PCM, 32): lambda data: (np.frombuffer(data, "<i4") / np.float64(1 << 31)).astype(np.float32),
    (_FLOAT, 32): lambda data: np.frombuffer(data, "<f4"),
    (_FLOAT, 64): lambda data: _float32(np.frombuffer(data, "<f8")),
}


def _wav(samples: Samples) -> bytes:
    buffer = io.BytesIO()
    data = samples.astype("<f4").tobytes()
    buffer.write(b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt ")
    buffer.write(struct.pack("<IHHIIHH", 16, _FLOAT, 1, SAMPLE_RATE, SAMPLE_RATE * 4, 4, 32))
    buffer.write(b"data" + struct.pack("<I", len(data)) + data)
    return buffer.getvalue()
