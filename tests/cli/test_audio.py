"""Sound on the command line: --audio, and /audio in a chat."""

import json
from pathlib import Path

import pytest

from llamacli import MediaError, load_model
from llamacli.cli.repl import Repl
from llamacli.cli.repl_settings import Settings
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams
from llamacli.testing.tiny_media import tone
from sound_cases import CASES, wav, write_hearing


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "question.wav").write_bytes(wav(tone()))
    return write_hearing(tmp_path, "qwen3a")


OPTIONS = ("-n", "3", "--temp", "0", "--json", "--mode", "fp32")


def test_the_sound_is_part_of_the_prompt(invoke, text, tmp_path: Path) -> None:
    def n_prompt(*options: str) -> int:
        result = invoke("run", text, *options, "What is it?", *OPTIONS)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["stats"]["n_prompt"]

    sound = ("--audio", str(tmp_path / "question.wav"))
    assert n_prompt(*sound) == n_prompt() + 10  # 8 rows and two tokens around them
    raw = invoke("run", text, "--raw", *sound, "x")
    assert "--audio is for chats" in raw.stderr
    for name, message in (("text.gguf", "is no sound of a known type"), ("none.wav", "none.wav")):
        wrong = invoke("run", text, "--audio", tmp_path / name, "x")
        assert (wrong.exit_code != 0, message in wrong.stderr) == (True, True)


def test_sound_goes_with_the_next_message(text, tmp_path: Path) -> None:
    case = CASES["qwen3a"]
    plugins = Plugins.of(case.text, media=[case.encoder])
    with load_model(text, "fp32", plugins=plugins, threads=1) as model, model.create_chat(max_tokens=3) as chat:
        settings = Settings(chat, SamplingParams(), seed=1, verbose=False, log=False, draft_max=4)
        repl = Repl(settings, shift=False, logged=None)
        repl._handle(f"/audio {tmp_path / 'question.wav'}")
        repl._handle("What is it?")
        assert [len(message.audio) for message in chat.history] == [1, 0]
        repl._handle("/regen 5")
        assert len(chat.history[0].audio) == 1
        repl._handle(f"/save {tmp_path / 'chat.json'}")
        repl._handle("/clear")
        repl._handle(f"/load {tmp_path / 'chat.json'}")
        assert chat.history[0].audio[0].source == wav(tone())
        with pytest.raises(MediaError, match="the model has no encoder of pictures"):
            repl._handle(f"/image {tmp_path / 'question.wav'}")
