"""Fixtures of the core's tests."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import tiny_variants
from llamacli import Model, load_model
from llamacli.engine import Engine, ReferenceEngine, default_engine
from llamacli.plugins import Plugins
from paths import entry_points

ENGINES = {"reference": ReferenceEngine, "default": default_engine}

SHARED = Path(__file__).resolve().parents[2] / "shared"

TinyGguf = Callable[..., Path]
LoadTiny = Callable[..., Model]


def first_variants(names: Iterable[str]) -> set[str]:
    """First variant of each architecture among some of `tiny_variants`."""
    every = tiny_variants.VARIANTS | tiny_variants.ENCODERS | tiny_variants.CLASSIFIERS
    first = dict[object, str]()
    for name in names:
        first.setdefault((every[name].write, every[name].options.get("architecture")), name)
    return set(first.values())


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine."""
    return request.param()


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """Model families of this repository, whatever else is installed."""
    return Plugins(entry_points())


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """Write a variant of `tiny_variants.VARIANTS`, once, with these options on top."""
    directory = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def write(variant: str = "gqa", **options: Any) -> Path:
        key = repr((variant, options))
        if key not in made:
            made[key] = tiny_variants.write(directory / f"{variant}-{len(made)}.gguf", variant, **options)
        return made[key]

    return write


@pytest.fixture
def load_tiny(tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine) -> LoadTiny:
    """Load a tiny model: `load_tiny(variant, mode, **options)`."""

    def load(variant: str = "gqa", mode: str = "fp32", **options: Any) -> Model:
        return load_model(tiny_gguf(variant, **options), mode, plugins=plugins, engine=engine)

    return load


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Path of a real model or vocabulary; skips where there is none."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        return path

    return find
