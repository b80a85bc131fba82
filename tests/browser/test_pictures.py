"""Pictures on the page: paste, drop, button, storage, refusals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from http_server import Served, served
from llamacli import Model, load_model
from llamacli.media.pictures import data_of_uri
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.http.page import PAGE
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings
from llamacli.testing.tiny_media import drawn
from media_cases import CASES, write_mmproj, write_text

if TYPE_CHECKING:
    from browser import PageDriver  # which imports selenium


def png(seed: int = 0, size: tuple[int, int] = (61, 33)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(drawn(*size, seed)).save(file, "PNG")
    return file.getvalue()


class _Seeing:
    """Page before two tiny models; `seen` are the server's pictures."""

    def __init__(self, page: PageDriver, seen: list[bytes]):
        self.page, self.seen = page, seen

    def give(self, way: str, name: str, content: bytes) -> None:
        self.page.give(way, name, content, "image/png")


@pytest.fixture(scope="module")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    case = CASES["idefics3"]
    plugins = Plugins.of(case.text, media=[case.encoder])

    def load(path: Path, mode: str, **options: Any) -> Model:
        return load_model(path, "fp32", plugins=plugins, **options)

    sources = []
    for name in ("seeing", "blind"):
        folder = tmp_path_factory.mktemp(name)
        sources.append(ModelSource(name, write_text(folder / "text.gguf", "idefics3")))
        if name == "seeing":
            write_mmproj(folder / "mmproj.gguf", "idefics3")
    engine = LocalEngine(sources, EngineSettings(threads=1, n_ctx=512, models_max=2), load)
    with served(engine, page=PAGE, template=None) as server:
        for name in ("seeing", "blind"):
            engine.load(name).result(120)
        yield server


@pytest.fixture
def seeing(driver: Any, seeing_server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Seeing]:
    from browser import PageDriver

    page, seen = PageDriver(driver, f"http://127.0.0.1:{seeing_server.port}/"), list[bytes]()

    def noted(uri: str) -> bytes:
        seen.append(data_of_uri(uri))
        return seen[-1]

    monkeypatch.setattr("llamacli.serve.http.pictures.data_of_uri", noted)
    page.open_empty()
    page.run("localStorage.setItem('llamacli-settings', JSON.stringify({params: {max_tokens: 4, temperature: 0}}))")
    page.open()
    yield _Seeing(page, seen)
    driver.get("about:blank")


def choose(page: PageDriver, model: str) -> None:
    page.run(
        "const list = document.querySelector('#model'); list.value = arguments[0];"
        " list.dispatchEvent(new Event('change'))",
        model,
    )


def test_paste_drop_and_button(seeing: _Seeing, tmp_path: Path) -> None:
    page = seeing.page
    seeing.give("paste", "one.png", png(1))
    seeing.page.wait_chips("one.png")
    seeing.give("drop", "two.png", png(2))
    seeing.page.wait_chips("one.png", "two.png")
    (tmp_path / "three.png").write_bytes(png(3))
    page.one("#composer input[type=file]").send_keys(str(tmp_path / "three.png"))
    seeing.page.wait_chips("one.png", "two.png", "three.png")
    page.press("Remove two.png")
    seeing.page.wait_chips("one.png", "three.png")
    page.wait(
        lambda: page.run("return [...document.querySelectorAll('.chip img')].every((one) => one.naturalWidth === 61)")
    )
    page.send("What is it?")
    page.wait_reply()
    assert seeing.seen == [png(1), png(3)]
    assert seeing.page.chips == []
    assert page.text(".message.user .plain") == "What is it?"
    assert [one.get_attribute("alt") for one in page.all(".message.user img")] == ["one.png", "three.png"]
    assert page.errors() == []


def test_pictures_are_kept_with_the_conversation(seeing: _Seeing) -> None:
    page = seeing.page
    seeing.give("drop", "one.png", png(1))
    seeing.page.wait_chips("one.png")
    page.press("Send")
    page.wait_reply()
    page.wait_text(".conversation .open", "one.png")
    page.driver.refresh()
    page.wait_ready()
    page.wait(lambda: page.run("return document.querySelector('.message.user img')?.naturalWidth") == 61)
    page.press("Regenerate")
    page.wait_text(".branches", "2/2")
    page.wait_reply()
    page.send("And now?")
    page.wait(lambda: len(seeing.seen) == 3)
    page.wait_reply()
    assert seeing.seen == [png(1)] * 3
    button = page.button("Enlarge one.png")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"


def test_export_and_import(seeing: _Seeing, tmp_path: Path) -> None:
    page = seeing.page
    image = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    files = [{"name": "one.png", "image": image}, {"name": "bad", "image": "https://host/a.png"}, {"name": "worse"}]
    user = {"role": "user", "content": "hi", "files": files, "children": [], "chosen": None}
    root = {"children": ["a"], "chosen": "a"}
    data = {"format": "llamacli-conversations", "version": 1, "conversations": [{"nodes": {"root": root, "a": user}}]}
    (tmp_path / "all.json").write_text(json.dumps(data))
    page.one("#import-file").send_keys(str(tmp_path / "all.json"))
    page.wait(lambda: page.run("return document.querySelector('.message.user img')?.naturalWidth") == 61)
    assert len(page.all(".message.user img")) == 1


def test_a_model_that_does_not_see(seeing: _Seeing) -> None:
    page = seeing.page
    seeing.give("drop", "one.png", png(1))
    seeing.page.wait_chips("one.png")
    choose(page, "blind")
    page.send("What is it?")
    page.wait_text(".toast", "The model blind does not see: it has no encoder of pictures")
    seeing.page.wait_chips("one.png")
    assert page.all(".message") == []
    page.press("Close", ".toast")
    seeing.give("paste", "two.png", png(2))
    page.wait_text(".toast", "two.png is not attached. The model blind does not see")
    seeing.page.wait_chips("one.png")
    page.press("Remove one.png")
    page.wait(lambda: not page.button("Send").get_attribute("disabled"))
    page.press("Send")
    page.wait_reply()
    assert seeing.seen == []


def test_files_that_are_no_pictures(seeing: _Seeing) -> None:
    for name, content in (("text.png", b"hello"), ("cut.png", png()[:60])):
        seeing.give("drop", name, content)
        seeing.page.wait_text(".toast", f"{name} is damaged, or not a picture that this browser can show.")
    assert seeing.page.chips == []


def test_a_large_picture_is_made_smaller(seeing: _Seeing) -> None:
    noise = np.random.RandomState(0).randint(0, 256, (1200, 4000, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG", compress_level=0)
    seeing.give("drop", "large.png", file.getvalue())
    seeing.page.wait_chips("large.png (made smaller: 3739 × 1121)")
    seeing.page.send("What is it?")
    seeing.page.wait_reply(60)
    (sent,) = seeing.seen
    with Image.open(io.BytesIO(sent)) as image:
        assert (image.format, image.size) == ("JPEG", (3739, 1121))
