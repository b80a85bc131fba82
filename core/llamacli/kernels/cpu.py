"""Features of this CPU as LLVM finds them, kept in a file.

Loading LLVM for them alone would take 40 MB and 30 ms of each start with cached kernels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path

from llvmlite import __version__

from llamacli.errors import LlamaCliError
from llamacli.util.files import make_own_folder, open_own, replacing
from llamacli.util.folders import cache_folder

_FILE = "cpu.json"

_CPUINFO = Path("/proc/cpuinfo")
_ABOUT_CPU = re.compile(r"^(?:vendor_id|cpu family|model|model name|stepping|microcode|flags)\s*:.*", re.MULTILINE)
"""Lines about an x86 CPU, of which `flags` lists the features."""


@functools.cache
def host() -> tuple[str, str, str]:
    """Triple, name and features of this CPU, for LLVM."""
    key, folder = _key(), cache_folder()
    if not key or not folder:
        return _ask_llvm()
    kept = _kept(folder / _FILE)
    if kept[:1] == [key]:
        _, triple, name, features = kept
        return triple, name, features
    found = _ask_llvm()
    with contextlib.suppress(LlamaCliError, OSError):
        make_own_folder(folder)
        with replacing(folder / _FILE, overwrite=True) as file:
            file.write(json.dumps([key, *found]).encode())
    return found


def _ask_llvm() -> tuple[str, str, str]:
    from llvmlite import binding

    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def _key() -> str:
    """Text about LLVM and the first core, "" where the system has none."""
    try:
        first, _, _ = _CPUINFO.read_text().partition("\n\n")
    except OSError:
        return ""
    lines = _ABOUT_CPU.findall(first)
    return "\n".join([__version__, *lines]) if any(line.startswith("flags") for line in lines) else ""


def _kept(path: Path) -> list[str]:
    """Key, triple, name and features; [] of a damaged file, or another user's."""
    with contextlib.suppress(OSError, ValueError), open_own(path) as file:
        match json.load(file):
            case [str(), str(), str(), str()] as kept:
                return kept
    return []
