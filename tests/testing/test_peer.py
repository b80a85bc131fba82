"""llama.cpp through llama-cpp-python."""

from pathlib import Path

import pytest

import llamacli.testing.peer
from conftest import TinyGguf
from llamacli.testing import checks_of, write_architecture
from llamacli.testing.peer import Peer, run_peer
from llamacli_llama import Llama


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


FAKE = """
import os, sys
{body}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "print('a.cpp:3: GGML_ASSERT(x) failed', file=sys.stderr); print('bt'); os.abort()",
            "ended by signal 6: a.cpp:3",
        ),
        ("raise OSError('llama.cpp refuses it')", "llama.cpp refuses it$"),
    ],
)
def test_the_end_of_llama_cpp_is_an_error(
    body: str, said: str, tmp_path: Path, tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE.replace("{body}", body))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OSError, match=said):
        run_peer(tiny_gguf("gqa"), [1, 2, 3], 2, 1)


def test_a_missing_peer_is_named(tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacli.testing.peer, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install llama-cpp-python"):
        run_peer(tiny_gguf("gqa"), [1, 2, 3], 2, 1)


def test_variants_without_a_bound_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacli.testing.peer, "find_spec", lambda name: None)
    (check,) = (
        check
        for check in checks_of(Llama(), {"odd": (write_architecture, {"architecture": Llama()}, None)}, peer=True)
        if check.name == "peer"
    )
    assert check() is None
