"""Sound on the page: drop, button, player, storage, refusals."""

from __future__ import annotations

import base64
import json
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from http_server import Served, served
from llamacli import Model, load_model
from llamacli.media.files import data_of_base64
from llamacli.media.sound import Sound
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.http.page import PAGE
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings
from llamacli.testing.tiny_media import tone
from sound_cases import CASES, wav, write_hearing

if TYPE_CHECKING:
    from browser import PageDriver  # which imports selenium

DURATION = "return document.querySelector('.message.user audio')?.duration"


@pytest.fixture(scope="module")
def hearing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    case = CASES["qwen3a"]
    plugins = Plugins.of(case.text, media=[case.encoder])

    def load(path: Path, mode: str, **options: Any) -> Model:
        return load_model(path, "fp32", plugins=plugins, **options)

    sources = []
    for name in ("hearing", "deaf"):
        folder = tmp_path_factory.mktemp(name)
        sources.append(ModelSource(name, write_hearing(folder, "qwen3a")))
        if name == "deaf":
            (folder / "mmproj-text.gguf").unlink()
    engine = LocalEngine(sources, EngineSettings(threads=1, n_ctx=512, models_max=2), load)
    with served(engine, page=PAGE, template=None) as server:
        for name in ("hearing", "deaf"):
            engine.load(name).result(120)
        yield server


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Files that the server has been sent."""
    files: list[bytes] = []

    def noted(*given: Any) -> bytes:
        files.append(data_of_base64(*given))
        return files[-1]

    monkeypatch.setattr("llamacli.serve.http.pictures.data_of_base64", noted)
    return files


@pytest.fixture
def page(driver: Any, hearing_server: Served, heard: list[bytes]) -> Iterator[PageDriver]:
    from browser import PageDriver

    page = PageDriver(driver, f"http://127.0.0.1:{hearing_server.port}/")
    page.open_empty()
    page.run("localStorage.setItem('llamacli-settings', JSON.stringify({params: {max_tokens: 4, temperature: 0}}))")
    page.open()
    yield page
    driver.get("about:blank")


def test_drop_button_and_player(page: PageDriver, heard: list[bytes], tmp_path: Path) -> None:
    page.give("drop", "one.wav", wav(tone()), "audio/wav")
    page.wait_chips("one.wav")
    (tmp_path / "two.wav").write_bytes(wav(tone(0.3)))
    page.one("#composer input[type=file]").send_keys(str(tmp_path / "two.wav"))
    page.wait_chips("one.wav", "two.wav")
    page.press("Remove two.wav")
    page.send("What is it?")
    page.wait_reply()
    assert heard == [wav(tone())]
    page.wait(lambda: page.run(DURATION) == pytest.approx(0.6, abs=0.01))
    assert page.text(".message.user figcaption") == "one.wav"
    page.driver.refresh()
    page.wait_ready()
    page.wait(lambda: page.run(DURATION) == pytest.approx(0.6, abs=0.01))
    page.send("And now?")
    page.wait(lambda: len(heard) == 2)
    page.wait_reply()
    assert heard == [wav(tone())] * 2
    assert page.errors() == []


def test_other_types_become_wav_files(page: PageDriver, heard: list[bytes]) -> None:
    both = np.stack([tone(0.5, rate=48_000), tone(0.5, rate=48_000)], 1)
    page.give("drop", "one.ogg", wav(both, 48_000), "audio/ogg")
    page.wait_chips("one.ogg")
    page.send("What is it?")
    page.wait_reply()
    with wave.open(BytesIO(heard[0])) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, 16_000, 2)
        assert file.getnframes() == 8_000
    np.testing.assert_allclose(Sound.of(heard[0]).samples[100:-100], tone(0.5)[100:-100], atol=0.05)


def test_what_is_refused(page: PageDriver, heard: list[bytes]) -> None:
    for name, content, words in (
        ("cut.wav", wav(tone())[:20], "cut.wav is damaged, or no sound that this browser can play."),
        ("long.ogg", wav(np.zeros(3_700_000, np.float32)), "long.ogg has 3.9 minutes; up to 3.8 can be attached."),
    ):
        page.give("drop", name, content, f"audio/{name[-3:]}")
        page.wait_text(".toast", words)
        page.press("Close", ".toast")
    page.give("drop", "one.wav", wav(tone()), "audio/wav")
    page.wait_chips("one.wav")
    page.run(
        "const list = document.querySelector('#model'); list.value = 'deaf'; list.dispatchEvent(new Event('change'))"
    )
    page.send("What is it?")
    page.wait_text(
        ".toast", "The model deaf does not hear: it has no encoder of sound (a mmproj file). Remove the sound"
    )
    page.press("Close", ".toast")
    page.give("drop", "two.wav", wav(tone()), "audio/wav")
    page.wait_text(".toast", "two.wav is not attached. The model deaf does not hear")
    assert heard == []


def test_import(page: PageDriver, tmp_path: Path) -> None:
    audio = f"data:audio/wav;base64,{base64.b64encode(wav(tone())).decode()}"
    files = [{"name": "one.wav", "audio": audio}, {"name": "bad", "audio": "https://host/a.wav"}]
    user = {"role": "user", "content": "hi", "files": files, "children": [], "chosen": None}
    root = {"children": ["a"], "chosen": "a"}
    data = {"format": "llamacli-conversations", "version": 1, "conversations": [{"nodes": {"root": root, "a": user}}]}
    (tmp_path / "all.json").write_text(json.dumps(data))
    page.one("#import-file").send_keys(str(tmp_path / "all.json"))
    page.wait(lambda: page.run(DURATION) == pytest.approx(0.6, abs=0.01))
    assert len(page.all(".message.user audio")) == 1
