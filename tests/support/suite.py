"""Pytest plugin: Hypothesis profiles, and one kernel cache for all processes of a run."""

import gc
import os
from pathlib import Path
from typing import Any

import filelock
import hypothesis
import pytest

from llamacli.util.folders import user_folder

PROFILE = os.environ.get("LLAMACLI_TEST_PROFILE", "quick")
"""`quick` tries a fifth of the examples that `full` does."""

QUICK = 5

# No deadline: how long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=100 // QUICK)
hypothesis.settings.load_profile(PROFILE)


STRIDE = 1 if PROFILE == "full" else QUICK
"""Of many instants or cuts that a test marked `deep` goes through, the quick profile takes each `STRIDE`th."""


def examples(n: int, **options: Any) -> hypothesis.settings:
    """Settings of a Hypothesis test that tries `n` examples in the full profile."""
    return hypothesis.settings(max_examples=n if PROFILE == "full" else max(1, n // QUICK), **options)


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled kernels with programs that tests start, whatever their home folder is, and between workers."""
    folder = os.environ.get("LLAMACLI_CACHE") or user_folder("cache") or config.rootpath / ".pytest_cache" / "llamacli"
    os.environ["LLAMACLI_CACHE"] = str(folder)
    if hasattr(config, "workerinput"):
        _compile_once(Path(folder) / "locks")


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of garbage collections, which tests ask for often."""
    gc.collect()
    gc.freeze()


def _compile_once(folder: Path) -> None:
    """Make a worker wait for a kernel that another one compiles, and load it then."""
    from llamacli.kernels import jit

    folder.mkdir(parents=True, exist_ok=True)
    compile_alone = jit._OnDemand.compile

    def compile_locked(self: Any) -> Any:
        if self._code is not None:
            return self._code
        with filelock.FileLock(folder / f"{self.name}.lock"):
            return compile_alone(self)

    jit._OnDemand.compile = compile_locked  # type: ignore[method-assign]
