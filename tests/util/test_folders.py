import sys
from pathlib import Path

import pytest

from llamacli.util.folders import user_folder


@pytest.mark.parametrize(
    ("platform", "kind", "folder"),
    [
        ("linux", "cache", "/somewhere/.cache/llamacli"),
        ("linux", "state", "/somewhere/.local/state/llamacli"),
        ("darwin", "cache", "/somewhere/Library/Caches/llamacli"),
        ("darwin", "state", "/somewhere/Library/Application Support/llamacli"),
    ],
)
def test_the_usual_places(platform: str, kind, folder: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/somewhere")
    for relative in ("", "relative"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", relative)
        assert user_folder(kind) == Path(folder)
    monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", "/elsewhere")
    assert user_folder(kind) == Path("/elsewhere/llamacli")


def test_a_user_without_a_home_has_none(monkeypatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    assert user_folder("state") is None
