"""Per-user cache and state directories."""

import os
from pathlib import Path
from typing import Literal

import platformdirs


def user_folder(kind: Literal["cache", "state"]) -> Path | None:
    """The user's cache or state directory for llamacli.

    None for a user without a home.
    XDG variables count on all platforms; empty and relative ones are ignored, as their specification demands.
    """
    home = os.path.expanduser("~")
    if not (os.path.isabs(home) or os.path.isabs(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))):
        return None  # versions of platformdirs differ in what they make of a relative HOME
    folders = platformdirs.PlatformDirs("llamacli", appauthor=False)
    try:
        return folders.user_cache_path if kind == "cache" else folders.user_state_path
    except RuntimeError:  # HOME is empty and the user is not in the password database
        return None
