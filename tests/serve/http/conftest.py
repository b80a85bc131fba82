"""Fixtures of the HTTP layer: a fake engine, served on the loopback."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from demo_copies import write_demo_without_template
from fake_engine import FakeEngine
from http_server import Served, served
from llamacli import Model, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import Plugins

Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def demo(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The demo model without its template: 2048 tokens, a context of 1024."""
    path = write_demo_without_template(tmp_path_factory.mktemp("demo"))
    return load_model(path, plugins=plugins, engine=ReferenceEngine())


@pytest.fixture(scope="session")
def shared_engine(demo: Model) -> FakeEngine:
    """A fake engine for all tests: starting a server takes time."""
    return FakeEngine(demo)


@pytest.fixture(scope="session")
def shared_server(shared_engine: FakeEngine) -> Iterator[Served]:
    """The fake engine, served with default settings."""
    with served(shared_engine) as server:
        yield server


@pytest.fixture
def fake(shared_engine: FakeEngine, demo: Model) -> FakeEngine:
    """The fake engine in its first state.

    Its `script` plays the events of each request.
    """
    shared_engine.__init__(demo)  # type: ignore[misc]
    return shared_engine


@pytest.fixture
def serve(demo: Model, fake: FakeEngine) -> Iterator[Serve]:
    """Serve the fake engine, with further settings."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Served:
            return stack.enter_context(served(fake, **settings))

        yield start
    fake.__init__(demo)  # type: ignore[misc]


@pytest.fixture
def http(fake: FakeEngine, shared_server: Served) -> Served:
    """The fake engine, served with default settings."""
    return shared_server
