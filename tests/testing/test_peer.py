"""llama.cpp through llama-cpp-python."""

from pathlib import Path

import pytest

from conftest import TinyGguf
from llamacli.testing.peer import Peer


def test_log_is_silent(tiny_gguf: TinyGguf, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp")
    with Peer(tiny_gguf("gqa"), 64) as peer:
        assert peer.eval([1, 2]).shape == (2, peer.n_vocab)
    assert capfd.readouterr() == ("", "")


def test_refused_file_says_why(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(OSError, match=r"llama.cpp refuses .*model\.gguf: .*magic"):
        Peer(path, 64)
