"""llama.cpp through llama-cpp-python."""

from pathlib import Path

import numpy as np
import pytest

import llamacli.testing.peer
from conftest import TinyGguf
from llamacli import load_model
from llamacli.gguf import open_gguf
from llamacli.plugins import Plugins
from llamacli.quantization.tensor_types import TensorType
from llamacli.testing import checks_of, result_checks, write_architecture
from llamacli.testing.conformance import ConformanceError
from llamacli.testing.parametrize import Check
from llamacli.testing.peer import Peer, run_peer
from llamacli.testing.tiny import rounded_types, write_float32
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


@pytest.mark.medium
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


def peer_check(type_name: str) -> Check:
    variants = {"odd": (write_architecture, {"architecture": Llama(), "type": type_name}, 1e-8)}
    return next(check for check in checks_of(Llama(), variants, peer=True) if check.name == "peer")


def fake_peer(check: Check, monkeypatch: pytest.MonkeyPatch, *, exact: float = 0.0, rounded: float = 0.0) -> list[str]:
    """Replace llama.cpp by llamacli, whose results are off by some shares.

    Returns a list that gets the types of each file that is run.
    """
    (tiny,), types = check.models(), []

    def run(path: Path, tokens: list[int], n_prompt: int, n_greedy: int, **_: object) -> tuple:
        kinds = rounded_types(path)
        types.append(" ".join(kinds))
        off = 1 + (rounded if kinds else exact)
        with load_model(path, "auto" if kinds else "fp32", plugins=Plugins.of(Llama()), threads=1) as model:
            rows = model.create_session().eval(tokens, all_logits=True) * off
            greedy = model.create_session().generate(tokens[:n_prompt], max_tokens=n_greedy, ignore_eos=True)
            return rows, [token.id for token in greedy] if n_greedy else [], [1.0] * n_greedy

    assert tiny.exact == 1e-8
    monkeypatch.setattr(result_checks, "run_peer", run)
    return types


def test_quantized_weights_are_compared_as_float32_and_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    check = peer_check("Q8_0")
    types = fake_peer(check, monkeypatch)
    assert check() == 0
    assert types == ["", "Q8_0"]
    (remark,) = result_checks.remarks
    assert remark.startswith("odd: llama.cpp rounds activations before products with Q8_0: fp32 is compared with")


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ({"exact": 1e-3}, r"on these weights as float32 \(llama.cpp rounds .* Q8_0\): NMSE 1e-06, at most 1e-08"),
        (
            {"rounded": 0.2},
            r"mode auto against llama.cpp: NMSE 0.028, at most 0.01 is allowed, because llama.cpp rounds",
        ),
    ],
)
def test_bounds_of_quantized_weights(errors: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = peer_check("Q8_0")
    fake_peer(check, monkeypatch, **errors)
    with pytest.raises(ConformanceError, match=message):
        check()


def test_float32_files_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check = peer_check("F32")
    types = fake_peer(check, monkeypatch)
    assert check() == 0
    assert (types, result_checks.remarks) == ([""], [])


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "BF16"])
def test_float32_copies_have_the_same_numbers(type_name: str, tmp_path: Path) -> None:
    (tiny,) = peer_check(type_name).models()
    copy = write_float32(tiny.path, tmp_path / "copy.gguf")
    assert rounded_types(tiny.path) == [type_name]
    with open_gguf(tiny.path) as file, open_gguf(copy) as other:
        assert {info.type for info in other.tensors.values()} == {TensorType.F32}
        assert [other.pair(key) for key in other.metadata] == [file.pair(key) for key in file.metadata]
        assert list(other.tensors) == list(file.tensors)
        for name in file.tensors:
            np.testing.assert_array_equal(other.tensor(name), file.tensor(name))
