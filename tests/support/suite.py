"""Pytest plugin: Hypothesis profiles and one kernel cache for all processes."""

import gc
import os
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import pytest

from llamacli.util.folders import user_folder
from paths import add_plugin_paths

add_plugin_paths()

PROFILE = os.environ.get("LLAMACLI_TEST_PROFILE", "quick")
"""Profile: `quick` tries a fifth of the examples of `full`; `long` is `full`, but longer against the server."""

QUICK = 5

# No deadline: how long an example takes says more about what else the machine does.
for name in ("full", "long"):
    hypothesis.settings.register_profile(name, deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=100 // QUICK)
hypothesis.settings.load_profile(PROFILE)


STRIDE = QUICK if PROFILE == "quick" else 1
"""Step through the instants or offsets of a test marked `deep`."""


def examples(n: int, **options: Any) -> hypothesis.settings:
    """Settings of a Hypothesis test with `n` examples in the full profile."""
    return hypothesis.settings(max_examples=max(1, n // QUICK) if PROFILE == "quick" else n, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled kernels between workers, and with programs that tests start."""
    folder = os.environ.get("LLAMACLI_CACHE") or user_folder("cache") or config.rootpath / ".pytest_cache" / "llamacli"
    os.environ["LLAMACLI_CACHE"] = str(folder)
    if hasattr(config, "workerinput"):
        _compile_once(Path(folder) / "locks")


def pytest_collection_finish() -> None:
    """Exempt loaded modules from garbage collections, which many tests call for."""
    gc.collect()
    gc.freeze()


def _compile_once(folder: Path) -> None:
    """Lock each kernel while a worker compiles it; the others load it."""
    from llamacli.kernels import jit

    folder.mkdir(parents=True, exist_ok=True)
    compile_alone = jit.Compiled.compile

    def compile_locked(self: jit.Compiled) -> int:
        if self._address is not None:
            return self._address
        with filelock.FileLock(folder / f"{self.name}.lock"):
            return compile_alone(self)

    jit.Compiled.compile = compile_locked  # type: ignore[method-assign]
