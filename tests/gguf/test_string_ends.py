"""Ends of strings, compared with a loop over their lengths."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.gguf import string_ends as module
from llamacli.gguf.string_ends import string_ends

TEXTS = st.one_of(
    st.text(max_size=9).map(str.encode), st.binary(max_size=20), st.integers(0, 70_000).map(lambda n: b"x" * n),
    st.sampled_from([b"", b"\0", b"\0" * 8, b"\3" + bytes(7), b"a\3" + bytes(7) + b"abc", b"x" * 255, b"x" * 256]),
)  # fmt: skip


def array_of(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def ends_of(texts: list[bytes]) -> list[int]:
    return np.cumsum([8 + len(text) for text in texts], dtype=np.int64).tolist()


@given(texts=st.lists(TEXTS, max_size=30), start=st.integers(0, 9), step=st.integers(1, 4), window=st.integers(1, 300))
def test_ends_are_those_of_a_loop(texts: list[bytes], start: int, step: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STEP", step)
        patch.setattr(module, "_WINDOW", window)
        found = string_ends(bytes(start) + array_of(texts) + b"behind", start, len(texts))
    assert found.tolist() == ends_of(texts)


def test_a_vocabulary() -> None:
    texts = [b"a" * n for n in np.random.default_rng(0).integers(1, 300, 100_000)]
    assert string_ends(array_of(texts), 0, len(texts)).tolist() == ends_of(texts)


@given(texts=st.lists(TEXTS, min_size=1, max_size=30), cut=st.integers(1, 1 << 20))
def test_strings_behind_the_end(texts: list[bytes], cut: int) -> None:
    """Known as far as their lengths are."""
    data = array_of(texts)
    kept = len(data) - 1 - cut % len(data)
    ends = ends_of(texts)
    n_lengths = sum(end + 8 <= kept for end in [0, *ends[:-1]])
    assert string_ends(data[:kept], 0, len(texts)).tolist() == ends[:n_lengths]


@pytest.mark.parametrize("text", [b"", b"\0", b"a\3" + bytes(7) + b"abc"], ids=["empty", "zero", "length"])
def test_searches_are_few_for_any_text(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each of them finds one string, or none."""
    windows, search = [], module._found_ends
    monkeypatch.setattr(module, "_found_ends", lambda window: windows.append(len(window)) or search(window))
    assert len(string_ends(array_of([text] * 40_000), 0, 40_000)) == 40_000
    assert len(windows) < 10
