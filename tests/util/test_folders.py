import os
import pwd
from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from llamacli.util.folders import user_folder


@pytest.mark.parametrize(
    ("platform", "kind", "folder"),
    [
        (Unix, "cache", "/somewhere/.cache/llamacli"),
        (Unix, "state", "/somewhere/.local/state/llamacli"),
        (MacOS, "cache", "/somewhere/Library/Caches/llamacli"),
        (MacOS, "state", "/somewhere/Library/Application Support/llamacli"),
    ],
)
def test_default_locations_and_xdg_variables(platform: type, kind, folder: str, monkeypatch) -> None:
    monkeypatch.setattr(platformdirs, "PlatformDirs", platform)
    monkeypatch.setenv("HOME", "/somewhere")
    for relative in ("", "relative"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", relative)
        assert user_folder(kind) == Path(folder)
    for home in ("/somewhere", "nowhere"):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", "/elsewhere")
        assert user_folder(kind) == Path("/elsewhere/llamacli")


@pytest.mark.parametrize("home", ["nowhere", "", None])
def test_no_folder_for_a_user_without_a_home(home: str | None, monkeypatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert user_folder("state") is None


def test_empty_home_variable_means_the_registered_home(monkeypatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert user_folder("state") == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/llamacli"
