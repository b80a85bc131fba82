"""`llamacli trace`."""

import json

import pytest

from llamacli.testing.tiny_media import tone
from sound_cases import wav, write_hearing


def test_ops_are_listed(invoke, model) -> None:
    header, first, *rows = invoke("trace", model).stdout.splitlines()
    assert header.split() == ["op", "layer", "verb", "width", "tensors"]
    assert first.split() == ["0", "-", "embed", "64", "token_embd.weight"]
    assert any(row.split()[1:3] == ["1", "attention"] for row in rows)


@pytest.mark.parametrize("options", [["--tokens", "5,1"], ["-p", "once upon"]])
def test_values(options, invoke, model) -> None:
    rows = json.loads(invoke("trace", model, "--values", "--json", *options).stdout)
    assert rows[0]["verb"] == "embed"
    assert len(rows[0]["first"]) == 3
    assert all(row["norm"] > 0 for row in rows)


DUMP = """ggml_debug: embd = (f32) GET_ROWS(token_embd.weight{64, 1, 1, 1}, inp{1, 1, 1, 1}}) = {64, 1, 1, 1}
[ %.4f, %.4f, %.4f, ..., %.4f, %.4f, %.4f],
sum = 0.0
"""


@pytest.fixture
def embedding(invoke, model):
    """Printed numbers of a token's embedding."""
    from llamacli.tools.op_values import Recorded

    row = Recorded.of(model, _plugins()).values([5])[0].rows[0]
    return [*row[:3], *row[-3:]]


def _plugins():
    import llamacli.plugins

    return llamacli.plugins.installed_plugins()


def test_equal_dump(invoke, model, embedding, tmp_path) -> None:
    (tmp_path / "dump").write_text(DUMP % tuple(embedding))
    lines = invoke("trace", model, "--tokens", "5", "--against", tmp_path / "dump").stdout.splitlines()
    assert "=       embd " in lines[1]
    assert lines[-1] == "no op differs"


def test_first_difference_is_marked(invoke, model, embedding, tmp_path) -> None:
    (tmp_path / "dump").write_text(DUMP % (embedding[0] + 1, *embedding[1:]))
    lines = invoke("trace", model, "--tokens", "5", "--against", tmp_path / "dump").stdout.splitlines()
    assert "! <- first difference" in lines[1]
    assert lines[-1] == "first difference: op 0, embed of token_embd.weight"


def test_invalid_ids(invoke, model) -> None:
    result = invoke("trace", model, "--values", "--tokens", "a,b")
    assert result.exit_code == 2
    assert "'a,b' is not a list of integers" in result.stderr


def test_encoders_of_pictures(invoke, model, tmp_path) -> None:
    from PIL import Image

    from llamacli.testing.tiny_media import drawn, write_mmproj
    from llamacli_llama.idefics3 import Idefics3

    mmproj = write_mmproj(tmp_path / "mmproj.gguf", architecture=Idefics3())
    Image.fromarray(drawn(32, 32)).save(tmp_path / "picture.png")
    assert invoke("trace", mmproj).stdout.splitlines()[1].split()[2] == "patches"
    rows = json.loads(invoke("trace", mmproj, "--image", tmp_path / "picture.png", "--json").stdout)
    assert rows[-1]["tensors"] == ["mm.model.fc.weight"]
    assert rows[-1]["norm"] > 0
    missing = invoke("trace", mmproj, "--values")
    assert missing.exit_code == 2
    assert "The encoder of a mmproj file needs a picture: --image FILE." in missing.stderr
    text = invoke("trace", model, "--image", tmp_path / "picture.png")
    assert text.exit_code == 2
    assert f"--image is for the encoder of a mmproj file, and {model} is a model of text." in text.stderr


def test_encoders_of_sound(invoke, model, tmp_path) -> None:
    text = write_hearing(tmp_path, "qwen3a")
    mmproj, sound = tmp_path / "mmproj-text.gguf", tmp_path / "sound.wav"
    sound.write_bytes(wav(tone()))
    rows = json.loads(invoke("trace", mmproj, "--audio", sound, "--json").stdout)
    assert (rows[-1]["tensors"], rows[-1]["norm"] > 0) == (["mm.a.mlp.2.weight", "mm.a.mlp.2.bias"], True)
    for options, reason in [
        ([mmproj, "--values"], "The encoder of a mmproj file needs sound: --audio FILE."),
        ([text, "--audio", sound], f"--audio is for the encoder of a mmproj file, and {text} is a model of text."),
        ([mmproj, "--audio", sound, "--image", sound], "--image and --audio: an encoder reads one of them."),
    ]:
        wrong = invoke("trace", *options)
        assert (wrong.exit_code, reason in wrong.stderr) == (2, True)
