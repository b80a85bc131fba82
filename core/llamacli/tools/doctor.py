"""What is known of the machine, of the kernels and of the plugins, and what of it makes models slow or fail."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from llamacli import engine
from llamacli.engine.catalog import catalog
from llamacli.kernels.isa import VARIABLE, available, isa
from llamacli.kernels.jit import cache_directory
from llamacli.plugins import PluginInfo
from llamacli.util.system import ROOT, Cores, memory_limit, usable_cores

PACKAGES = ("llamacli", "numba", "llvmlite", "numpy", "gguf", "tokenizers")

_LITTLE_MEMORY = 1 << 30


@attrs.frozen
class Advice:
    """Something that makes models slow or fail: `what` it is and does, and what to `do` about it."""

    what: str
    do: str


@attrs.frozen
class Cpu:
    """The processor's name, what may be used of it, and how many CPUs of any kind the machine has."""

    name: str
    n_cpus: int
    cores: Cores
    isa: str
    available: tuple[str, ...]
    governor: str | None
    load: float | None


@attrs.frozen
class Memory:
    """Bytes: of the machine, free for new programs, and at most for this one's control group."""

    total: int | None
    free: int | None
    limit: int | None
    huge_pages: str | None


@attrs.frozen
class KernelCache:
    """The folder of compiled kernels: whether it can be written, and how many of the kernels are there."""

    folder: str | None
    writable: bool
    n_bytes: int
    n_compiled: int
    n_kernels: int


@attrs.frozen
class Report:
    """All that is known, and what to do about it. `versions` are of packages, "" for one that is missing."""

    versions: dict[str, str]
    cpu: Cpu
    memory: Memory
    kernels: KernelCache
    jit_disabled: bool
    plugins: tuple[PluginInfo, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return attrs.asdict(self) | {
            "threads": self.cpu.cores.threads,
            "advice": [attrs.asdict(advice) for advice in self.advice()],
        }

    def advice(self) -> list[Advice]:
        """What could be better, the worst first."""
        return [*self._of_plugins(), *self._of_kernels(), *self._of_cpu(), *self._of_memory()]

    def _of_plugins(self) -> Iterator[Advice]:
        for plugin in self.plugins:
            if plugin.error:
                yield Advice(plugin.error, f"reinstall or uninstall {plugin.distribution}")
        if not any(plugin.architectures and not plugin.error for plugin in self.plugins):
            yield Advice("no plugin that runs models is installed", "pip install 'llamacli[all]'")

    def _of_kernels(self) -> Iterator[Advice]:
        if self.jit_disabled:
            yield Advice(
                "NUMBA_DISABLE_JIT is set: models are computed by NumPy, many times slower", "unset NUMBA_DISABLE_JIT"
            )
        elif not self.kernels.writable:
            where = self.kernels.folder or "there is no home folder and LLAMACLI_CACHE names none, so they"
            yield Advice(
                f"{where} cannot be written: kernels are compiled anew in each process, which takes seconds",
                "set LLAMACLI_CACHE to a folder that can be written",
            )
        elif self.kernels.n_compiled < self.kernels.n_kernels:
            missing = self.kernels.n_kernels - self.kernels.n_compiled
            yield Advice(
                f"{missing} of {self.kernels.n_kernels} kernels are not compiled yet: the first model that needs one "
                "waits for it",
                "llamacli warmup",
            )

    def _of_cpu(self) -> Iterator[Advice]:
        cpu, cores = self.cpu, self.cpu.cores
        if cpu.isa != cpu.available[-1]:
            yield Advice(
                f"{VARIABLE} chooses {cpu.isa}, though this CPU runs {cpu.available[-1]}, which is faster",
                f"unset {VARIABLE}",
            )
        elif cpu.isa == "generic":
            yield Advice(
                "there are no kernels for this CPU's own instructions: plain vector code is used, which is slower",
                "use a CPU with AVX2 or, of ARM's, one with the dot product, if one is to be had",
            )
        if cores.threads < cores.physical:
            yield Advice(
                f"the control group grants {cores.quota:g} CPUs' worth of time, so {cores.threads} of "
                f"{cores.physical} cores are used",
                "raise the container's CPU limit",
            )
        if cores.logical < cpu.n_cpus:
            yield Advice(
                f"this process may run on {cores.logical} of {cpu.n_cpus} CPUs only",
                "start it without taskset, or with a larger cpuset",
            )
        if cpu.governor == "powersave":
            yield Advice(
                "the CPU's frequency is kept low (governor powersave)", "choose the governor performance or schedutil"
            )
        if cpu.load is not None and cpu.load > 0.5 * cpu.n_cpus:
            yield Advice(
                f"{cpu.load:.1f} of {cpu.n_cpus} CPUs were busy in the last minute: all threads wait for the slowest",
                "end other programs, or compute with fewer threads (-t)",
            )

    def _of_memory(self) -> Iterator[Advice]:
        memory = self.memory
        if memory.huge_pages == "never":
            yield Advice(
                "transparent huge pages are off: reading weights misses the table of pages more often",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        sizes = [size for size in (memory.free, memory.limit) if size is not None]
        if sizes and min(sizes) < _LITTLE_MEMORY:
            yield Advice(
                f"only {min(sizes) >> 20} MiB of memory are free for this process: larger models will not fit",
                "end other programs, or raise the container's memory limit",
            )


def examine(plugins: tuple[PluginInfo, ...], root: Path = ROOT) -> Report:
    """Look at everything. `root` is where the system's files about it begin."""
    return Report(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        cpu=_cpu(root),
        memory=_memory(root),
        kernels=_kernels(),
        jit_disabled=engine.jit_disabled(),
        plugins=plugins,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu(root: Path) -> Cpu:
    model = _fields(root / "proc/cpuinfo").get("model name", "") or platform.processor() or platform.machine()
    load = _text(root / "proc/loadavg")
    return Cpu(
        name=model,
        n_cpus=os.cpu_count() or 1,
        cores=usable_cores(root),
        isa=isa(),
        available=available(),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
        load=float(load.split()[0]) if load else None,
    )


def _memory(root: Path) -> Memory:
    sizes = {name: int(value.split()[0]) << 10 for name, value in _fields(root / "proc/meminfo").items()}
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = pages[pages.index("[") + 1 : pages.index("]")] if "[" in pages and "]" in pages else None
    return Memory(sizes.get("MemTotal"), sizes.get("MemAvailable"), memory_limit(root), chosen)


def _kernels() -> KernelCache:
    folder, kernels = cache_directory(), catalog()
    if folder is None:
        return KernelCache(None, False, 0, 0, len(kernels))
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.kernel")}
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return KernelCache(
        folder=str(folder),
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        n_bytes=sum(sizes.values()),
        n_compiled=sum(kernel.name in sizes for kernel in kernels),
        n_kernels=len(kernels),
    )


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines of one of the system's files; the first of a name counts."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
