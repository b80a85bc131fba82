"""Screenshots of the web page for the documentation.

    python tools/screenshots.py [FOLDER]

Needs the extra `browser`, and Debian's chromium and chromium-driver. Pictures have few colours, so that they are small.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from PIL import Image, ImageDraw  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

from browser import PageDriver, chromium, missing  # noqa: E402
from http_server import served  # noqa: E402
from llamacli.hub.demo import demo_path  # noqa: E402
from llamacli.serve.engine import LocalEngine  # noqa: E402
from llamacli.serve.http.page import PAGE  # noqa: E402
from llamacli.serve.models import ModelSource  # noqa: E402
from llamacli.serve.settings import EngineSettings  # noqa: E402

SIZE = (1200, 780)
PHONE = {"width": 390, "height": 780, "deviceScaleFactor": 1, "mobile": True}
SCALE = 1.25
"""Pixels of a picture for each of the page."""

N_COLOURS = 256

SHAPES = ROOT / "docs" / "tutorials" / "shapes" / "shapes.gguf"

# Shows code and a table, which the demo model does not write. It has no numbers, as no model wrote it.
REPLY = """\
A list comprehension builds a list in one expression:

```python
def squares(n: int) -> list[int]:
    # Even numbers only.
    return [i * i for i in range(n) if i % 2 == 0]
```

| form | result | evaluated |
|:--|:--|--:|
| `[f(x) for x in xs]` | a list | at once |
| `(f(x) for x in xs)` | a generator | when it is read |

Take the **generator** where the values are read once, such as in `sum(i * i for i in xs)`.
"""
FORMULAS = r"""
The sum of a *geometric series* with the ratio \(q \neq 1\) is

\[ \sum_{k=0}^{n} q^k = \frac{1 - q^{n+1}}{1 - q}. \]

For \(|q| < 1\) the power \(q^{n+1}\) vanishes as \(n \to \infty\), so that

\[ \sum_{k=0}^{\infty} q^k = \frac{1}{1 - q}, \qquad\text{for example}\qquad 1 + \tfrac12 + \tfrac14 + \dots = 2. \]
"""
STORY = "Tell me a story about a fox named Rusty."
TITLES = ("A letter to the landlord", "Regular expressions for dates", "Plan of a week in Oslo")


def conversation(number: int, title: str, question: str, reply: str, age_s: float) -> dict[str, object]:
    """Conversation of one question and one reply, as in exports."""
    now = (time.time() - age_s) * 1000
    messages = [
        {"id": "a", "role": "user", "content": question, "children": ["b"], "chosen": "b"},
        {"id": "b", "role": "assistant", "content": reply, "finish": "stop", "children": []},
    ]
    nodes = {"root": {"id": "root", "children": ["a"], "chosen": "a"}, **{str(one["id"]): one for one in messages}}
    return {"id": str(number), "title": title, "created": now, "updated": now, "settings": {}, "nodes": nodes}


def example(folder: Path) -> Path:
    """File with conversations to import."""
    talks = [conversation(i, title, title, "Here it is.", 86_400 * (i + 1) - 3600) for i, title in enumerate(TITLES)]
    talks.append(conversation(8, "Sum of a series", "What is the sum of a geometric series?", FORMULAS, 120))
    talks.append(conversation(9, "Comprehensions in Python", "How do list comprehensions work?", REPLY, 60))
    file = folder / "conversations.json"
    file.write_text(json.dumps({"format": "llamacli-conversations", "version": 1, "conversations": talks}))
    return file


def main(folder: Path) -> None:
    """Write the pictures."""
    if reason := missing():
        sys.exit(f"screenshots: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    sources = [ModelSource("demo", demo_path()), ModelSource("shapes", SHAPES)]
    engine = LocalEngine(sources, EngineSettings(max_running=2, models_max=2))
    with tempfile.TemporaryDirectory() as name, served(engine, page=PAGE, template=None) as server:
        for source in sources:
            engine.load(source.name).result(900)
        with chromium(Path(name), *SIZE) as driver:
            page = PageDriver(driver, f"http://127.0.0.1:{server.port}/")
            page.open()
            resize(page, {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": SCALE, "mobile": False})
            shoot(page, folder / "page-start.png")
            page.one("#import-file").send_keys(str(example(Path(name))))
            page.wait(lambda: page.all(".code"))
            tell_story(page)
            shoot(page, folder / "page.png")
            show_alternatives(page)
            shoot(page, folder / "page-probabilities.png")
            page.press("Sum of a series", ".conversations")
            page.wait(lambda: page.all("math"))
            page.run("document.activeElement.blur()")
            shoot(page, folder / "page-formulas.png")
            ask_about_picture(page, Path(name, "circle.png"))
            shoot(page, folder / "page-picture.png")
            theme(page, "dark")
            page.press("Comprehensions in Python", ".conversations")
            page.press("Settings")
            for title in ("Randomness",):
                page.run("document.querySelector(`details[data-title='${arguments[0]}']`).open = true", title)
            page.run("document.querySelector('#chat').scrollTop = 0; document.activeElement.blur()")
            shoot(page, folder / "page-settings.png")
            theme(page, "light")
            resize(page, {**PHONE, "deviceScaleFactor": SCALE})
            driver.refresh()
            page.wait_ready()
            page.wait(lambda: page.all(".code"))
            page.run("document.querySelector('#chat').scrollTop = 0; document.activeElement.blur()")
            shoot(page, folder / "page-phone.png")


def tell_story(page: PageDriver) -> None:
    """Write a story with the demo model."""
    page.press("New")
    page.press("Settings")
    for name, value in {"max_tokens": "300", "seed": "4"}.items():
        page.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
                 page.one(f"#param-{name}"), value)  # fmt: skip
    page.press("Close the settings")
    page.send(STORY)
    page.wait_reply()


def ask_about_picture(page: PageDriver, file: Path) -> None:
    """Ask the model of the tutorial about a picture."""
    picture = Image.new("RGB", (240, 240), "white")
    ImageDraw.Draw(picture).ellipse((40, 60, 200, 220), fill=(220, 40, 40))
    picture.save(file)
    page.press("New")
    page.run("const list = document.querySelector('#model'); list.value = 'shapes';"
             "list.dispatchEvent(new Event('change'))")  # fmt: skip
    page.one("#composer input[type=file]").send_keys(str(file))
    page.wait(lambda: page.all(".chip"))
    page.send("Which colour is it?")
    page.wait_reply()


def show_alternatives(page: PageDriver) -> None:
    """Show the alternatives of a word, after a branch at it."""
    number = unsure_word(page)
    page.run("arguments[0].click()", page.all("button.alternative")[0])
    page.wait_text(".message.assistant .branches", "2/2")
    page.wait_reply()
    show_tokens(page)[number].click()


def show_tokens(page: PageDriver) -> list[WebElement]:
    """Show the probabilities of the last reply; its tokens."""
    page.press("Probabilities of the tokens")
    page.wait(lambda: len(page.all(".tokens span")) >= 20)
    return page.all(".tokens span")


def unsure_word(page: PageDriver) -> int:
    """Choose a word that could well have been another one; its number."""
    spans = show_tokens(page)
    number = next(
        i for i, one in enumerate(spans)
        if i > 6 and one.get_attribute("class") in ("p3", "p4")
        and re.fullmatch(" [a-z]{3,}", str(one.get_property("textContent")))
    )  # fmt: skip
    spans[number].click()
    return number


def theme(page: PageDriver, name: str) -> None:
    """Choose the colours."""
    page.run("document.documentElement.dataset.theme = arguments[0]", name)
    page.run("localStorage.setItem('llamacli-theme', JSON.stringify(arguments[0]))", name)


def resize(page: PageDriver, metrics: dict[str, object]) -> None:
    """Set the size of the window."""
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shoot(page: PageDriver, file: Path) -> None:
    """Write a picture with few colours."""
    time.sleep(0.4)
    image = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    image.quantize(N_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {image.width} x {image.height}, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
