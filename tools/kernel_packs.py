"""Kernel packs, as the distribution llamacli-kernels has them: `python tools/kernel_packs.py FOLDER [--isa NAME]`.

All kernels of the core and of the installed plugins are compiled for each instruction set, whatever this CPU has. That
takes minutes of CPU time for each. A process is for one instruction set; as many run at once as there are cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llamacli.kernels import isa
from llamacli.kernels.packs import pack_name, packed
from llamacli.util.system import usable_cores

INSTRUCTION_SETS = tuple(name for name in isa.ISAS if name != "generic")
"""Instruction sets with packs: code of `generic` is for the CPU at hand."""


def build(folder: Path, instruction_sets: Sequence[str] = INSTRUCTION_SETS) -> None:
    """Write the packs of instruction sets to a folder.

    Raises subprocess.CalledProcessError if one fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}

    def build_one(name: str) -> None:
        command = [sys.executable, __file__, str(folder), "--only", name]
        subprocess.run(command, env=settings, check=True)

    with ThreadPoolExecutor(usable_cores().threads) as pool:
        list(pool.map(build_one, instruction_sets))


def write(path: Path, name: str) -> None:
    """Compile all kernels, in a process that runs none."""
    isa.compile_for(name)
    from llamacli.engine.catalog import catalog
    from llamacli.kernels.jit import fingerprint
    from llamacli.plugins import ARCHITECTURES, GENERAL, installed_plugins

    for group in (GENERAL, ARCHITECTURES):  # plugins' verbs have kernels
        installed_plugins().load_group(group)
    entries = {kernel.file_name: kernel.make_entry() for kernel in catalog()}
    data = packed(fingerprint(), entries)
    path.write_bytes(data)
    print(f"{path.name}: {len(entries)} kernels, {len(data)} bytes")


def main() -> None:
    """Build what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the packs")
    parser.add_argument("--isa", action="append", choices=INSTRUCTION_SETS, help="instruction set; default: all")
    parser.add_argument("--only", choices=INSTRUCTION_SETS, help="instruction set to build in this process")
    given = parser.parse_args()
    if given.only:
        write(given.folder / pack_name(given.only), given.only)
    else:
        build(given.folder, given.isa or INSTRUCTION_SETS)


if __name__ == "__main__":
    main()
