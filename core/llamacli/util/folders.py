"""Per-user cache, state and configuration directories."""

import os
from pathlib import Path
from typing import Literal

import platformdirs


def user_folder(kind: Literal["cache", "state", "config"]) -> Path | None:
    """The user's cache, state or configuration directory for llamacli.

    None for a user without a home.
    XDG variables count on all platforms; empty and relative ones are ignored, as their specification demands.
    """
    home = os.path.expanduser("~")
    if not (os.path.isabs(home) or os.path.isabs(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))):
        return None  # versions of platformdirs differ in what they make of a relative HOME
    folders = platformdirs.PlatformDirs("llamacli", appauthor=False)
    try:
        return Path(getattr(folders, f"user_{kind}_path"))
    except RuntimeError:  # HOME is empty and the user is not in the password database
        return None


def cache_folder() -> Path | None:
    """Cache folder: LLAMACLI_CACHE, else the user's; None without a home."""
    folder = os.environ.get("LLAMACLI_CACHE") or user_folder("cache")
    return Path(folder) if folder else None
