"""Folders that are the user's own: where things are kept between runs."""

import os
import sys
from pathlib import Path
from typing import Literal

_KINDS = {
    "cache": ("XDG_CACHE_HOME", ".cache", "Library/Caches"),
    "state": ("XDG_STATE_HOME", ".local/state", "Library/Application Support"),
}


def user_folder(kind: Literal["cache", "state"]) -> Path | None:
    """The system's folder for what can be made anew, or for what is remembered; None for a user without a home.

    Names in the environment that are empty or relative count for nothing: they would mean a place below the folder that
    the process happens to be in.
    """
    variable, usual, on_darwin = _KINDS[kind]
    named = Path(os.environ.get(variable, ""))
    if named.is_absolute():
        return named / "llamacli"
    try:
        home = Path.home() if os.environ.get("HOME") != "" else _registered_home()
    except (KeyError, RuntimeError):  # a user without a home
        return None
    if not home.is_absolute():
        return None
    return home / (on_darwin if sys.platform == "darwin" else usual) / "llamacli"


def _registered_home() -> Path:
    import pwd

    return Path(pwd.getpwuid(os.getuid()).pw_dir)
