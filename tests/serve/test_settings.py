"""Settings of the engine."""

from typing import Any

import pytest

from llamacli.errors import InvalidRequestError
from llamacli.serve import settings
from llamacli.serve.settings import EngineSettings, default_max_running
from llamacli.util.system import Cores


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_ctx": 0}, "n_ctx must be at least 1, not 0"),
        ({"max_running": 0}, "max_running must be from 1 to 512, not 0"),
        ({"max_running": 513}, "max_running must be from 1 to 512, not 513"),
        ({"step_ms": -1}, "step_ms must be at least 0, not -1"),
        ({"step_ms": float("nan")}, "step_ms must be at least 0, not nan"),
        ({"models_max": 0}, "models_max must be at least 1, not 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        EngineSettings(**wrong)


@pytest.mark.parametrize(("cores", "n"), [(2, 8), (4, 8), (5, 32), (64, 32)])
def test_default_of_running_texts(cores: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "usable_cores", lambda: Cores(cores, cores, None))
    assert default_max_running() == EngineSettings().max_running == n
