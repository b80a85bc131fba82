"""Fixtures of the tests in Chromium."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

from demo_copies import write_demo_without_template
from fake_engine import FakeEngine
from http_server import Served, served
from llamacli import Model, load_model
from llamacli.engine import ReferenceEngine
from llamacli.hub.demo import demo_path
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import ServeError
from llamacli.serve.http.page import PAGE
from llamacli.serve.models import ModelSource
from llamacli.serve.requests import Failed
from llamacli.serve.settings import EngineSettings

if importlib.util.find_spec("selenium") is None:
    REASON = "selenium is not installed: pip install 'llamacli[browser]'"
else:
    from browser import PageDriver, chromium, missing

    REASON = missing()


@pytest.hookimpl(tryfirst=True)  # before cases of the quick profile are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=REASON))


class PacedEngine(FakeEngine):
    """Fake engine that takes its time.

    It waits `pace` seconds before each event, and does not go on beyond event `limit`.
    """

    pace = 0.0
    limit: int | None = None

    async def _play(self, stream: Any, events: Any) -> None:
        for i, event in enumerate(events):
            while self.limit is not None and i >= self.limit and stream.id not in self.cancelled:
                await asyncio.sleep(0.005)
            if self.pace or i % 16 == 0:
                await asyncio.sleep(self.pace)
            if stream.id in self.cancelled:
                return
            stream.put([Failed(event) if isinstance(event, ServeError) else event])


@attrs.frozen
class Site:
    """Page before an engine whose replies are scripted."""

    page: PageDriver
    engine: PacedEngine
    server: Served


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.set_page_load_timeout(30)
        yield driver


@pytest.fixture(scope="session")
def demo(plugins: Plugins) -> Model:
    return load_model(demo_path(), plugins=plugins, engine=ReferenceEngine())


@pytest.fixture(scope="session")
def _scripted(demo: Model) -> Iterator[tuple[PacedEngine, Served]]:
    engine = PacedEngine(demo)
    with served(engine, page=PAGE) as server:
        yield engine, server


@pytest.fixture
def site(driver: Any, demo: Model, _scripted: tuple[PacedEngine, Served]) -> Iterator[Site]:
    """The page, empty, before a scripted engine."""
    engine, server = _scripted
    engine.__init__(demo)  # type: ignore[misc]
    engine.pace, engine.limit = 0.0, None
    page = PageDriver(driver, f"http://127.0.0.1:{server.port}/")
    page.open_empty()
    yield Site(page, engine, server)
    engine.limit = None
    driver.get("about:blank")


@pytest.fixture
def open_page(driver: Any, demo: Model) -> Iterator[Callable[..., Site]]:
    """Serve a scripted engine with other settings, and open its page."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> Site:
            engine = PacedEngine(demo)
            server = stack.enter_context(served(engine, page=PAGE, **settings))
            page = PageDriver(driver, f"http://127.0.0.1:{server.port}/")
            page.open()
            return Site(page, engine, server)

        yield begin
        driver.get("about:blank")


@pytest.fixture(scope="session")
def story_server(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model, which writes stories, without its chat template."""
    sources = [ModelSource("demo", write_demo_without_template(tmp_path_factory.mktemp("story")))]
    engine = LocalEngine(sources, EngineSettings(max_running=2), functools.partial(load_model, plugins=plugins))
    with served(engine, page=PAGE, slots=True, template=None) as server:
        engine.load("demo").result(120)
        yield server


@pytest.fixture
def story(driver: Any, story_server: Served) -> Iterator[tuple[PageDriver, Served]]:
    """The page, empty, before the demo model."""
    page = PageDriver(driver, f"http://127.0.0.1:{story_server.port}/")
    page.open_empty()
    yield page, story_server
    driver.get("about:blank")
