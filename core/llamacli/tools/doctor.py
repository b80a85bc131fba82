"""Diagnosis of CPU, memory, compiled kernels and plugins, with advice."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from llamacli import engine
from llamacli.engine import packed_copies
from llamacli.engine.catalog import catalog
from llamacli.kernels.isa import VARIABLE, available, isa
from llamacli.kernels.jit import cache_directory
from llamacli.model import Model, need_of
from llamacli.plugins import PluginInfo, installed_plugins
from llamacli.util import system
from llamacli.util.system import ROOT, Cores

PACKAGES = ("llamacli-core", "numba", "llvmlite", "numpy", "gguf", "regex")

_LITTLE_MEMORY = 1 << 30


@attrs.frozen
class Advice:
    """A problem (`what`) and its remedy (`do`)."""

    what: str
    do: str


@attrs.frozen
class Cpu:
    """Name, cores, instruction set, governor and load of the CPU.

    `n_cpus` are those of the machine, `available` its instruction sets.
    """

    name: str
    n_cpus: int
    cores: Cores
    isa: str
    available: tuple[str, ...]
    governor: str | None
    load: float | None


@attrs.frozen
class Memory:
    """Memory in bytes: total, available, and the cgroups' limit."""

    total: int | None
    free: int | None
    limit: int | None
    huge_pages: str | None


@attrs.frozen
class KernelCache:
    """Cache directory of compiled kernels, and the number of its kernels.

    `n_compiled` are those in the directory or in a pack.
    """

    folder: str | None
    writable: bool
    n_bytes: int
    n_compiled: int
    n_kernels: int


@attrs.frozen
class Copies:
    """Packed copies of models: their number, and their bytes with the limit."""

    n_copies: int
    n_bytes: int
    limit: int


@attrs.frozen
class Trial:
    """Speed of a model on a short prompt, in tokens per second.

    `numpy_shares` are the shares of the time, from 0 to 1, that ops without a kernel took.
    """

    path: str
    architecture: str
    n_tokens: int
    tps: float
    numpy_shares: dict[str, float]


@attrs.frozen
class Plan:
    """Memory that a model needs in bytes, and whether that is free.

    `fits` is None where the free memory is unknown.
    """

    path: str
    weights: int
    cache: int
    fits: bool | None


@attrs.frozen
class Report:
    """Report of the diagnosis; `versions` of packages, "" for a missing one."""

    versions: dict[str, str]
    cpu: Cpu
    memory: Memory
    kernels: KernelCache
    jit_disabled: bool
    plugins: tuple[PluginInfo, ...]
    copies: Copies = Copies(0, 0, 0)
    plan: Plan | None = None
    trial: Trial | None = None
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report and its advice as a dict, for JSON."""
        return attrs.asdict(self) | {
            "threads": self.cpu.cores.threads,
            "advice": [attrs.asdict(advice) for advice in self.advice()],
        }

    def advice(self) -> list[Advice]:
        """Problems and remedies, the most serious first."""
        return [*self._of_plugins(), *self._of_kernels(), *self._of_trial(), *self._of_cpu(), *self._of_memory()]

    def _of_plugins(self) -> Iterator[Advice]:
        for plugin in self.plugins:
            if plugin.error:
                yield Advice(plugin.error, f"reinstall or uninstall {plugin.distribution}")
        if not any(plugin.architectures and not plugin.error for plugin in self.plugins):
            yield Advice("no plugin that runs models is installed", "pip install llamacli")

    def _of_kernels(self) -> Iterator[Advice]:
        if self.jit_disabled:
            yield Advice(
                "NUMBA_DISABLE_JIT is set: models are computed with NumPy, many times slower", "unset NUMBA_DISABLE_JIT"
            )
        elif not self.kernels.writable:
            folder = self.kernels.folder
            problem = f"{folder} is not writable" if folder else "there is no home directory for the kernel cache"
            yield Advice(
                f"{problem}: every process compiles its kernels again, which takes seconds",
                "set LLAMACLI_CACHE to a writable directory",
            )
        elif self.kernels.n_compiled < self.kernels.n_kernels:
            missing = self.kernels.n_kernels - self.kernels.n_compiled
            yield Advice(
                f"{missing} of {self.kernels.n_kernels} kernels are not compiled yet: the first use takes longer",
                "llamacli warmup",
            )

    def _of_trial(self) -> Iterator[Advice]:
        if self.failure:
            yield Advice(f"the model does not run: {self.failure}", "see the message; --debug shows more")
        shares = self.trial.numpy_shares if self.trial else {}
        if shares:
            verbs = sorted({op.partition(",")[0] for op in shares})
            yield Advice(
                f"{'; '.join(verbs)}: no kernel, so NumPy takes {sum(shares.values()):.0%} of the time",
                "give the verb a kernel (docs/plugins.md), or ask the plugin's author for one",
            )

    def _of_cpu(self) -> Iterator[Advice]:
        cpu, cores = self.cpu, self.cpu.cores
        if cpu.isa != cpu.available[-1]:
            yield Advice(
                f"{VARIABLE} selects {cpu.isa}, but this CPU supports {cpu.available[-1]}, which is faster",
                f"unset {VARIABLE}",
            )
        elif cpu.isa == "generic":
            yield Advice(
                "no kernels use this CPU's own instructions: generic vector code is slower",
                "use a CPU with AVX2, or an ARM CPU with dot product instructions, if possible",
            )
        if cores.threads < cores.physical:
            yield Advice(
                f"the cgroup's CPU quota is {cores.quota:g} CPUs: {cores.threads} of {cores.physical} cores are used",
                "raise the container's CPU limit",
            )
        if cores.logical < cpu.n_cpus:
            yield Advice(
                f"the affinity mask allows {cores.logical} of {cpu.n_cpus} CPUs",
                "start without taskset, or with a larger cpuset",
            )
        if cpu.governor == "powersave":
            yield Advice(
                "the CPU frequency is kept low (governor powersave)", "select the governor performance or schedutil"
            )
        if cpu.load is not None and cpu.load > 0.5 * cpu.n_cpus:
            yield Advice(
                f"the load average is {cpu.load:.1f} on {cpu.n_cpus} CPUs: all threads wait for the slowest",
                "stop other programs, or use fewer threads (-t)",
            )

    def _of_memory(self) -> Iterator[Advice]:
        memory = self.memory
        if self.plan is not None and self.plan.fits is False:
            yield Advice(
                f"{self.plan.path} does not fit the free memory: its weights are read from disk when they are used",
                "take a smaller quantization or model, or end other programs",
            )
        if memory.huge_pages == "never":
            yield Advice(
                "transparent huge pages are off: reading weights causes more TLB misses",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        sizes = [size for size in (memory.free, memory.limit) if size is not None]
        if sizes and min(sizes) < _LITTLE_MEMORY:
            yield Advice(
                f"only {min(sizes) >> 20} MiB of memory are available to this process: larger models do not fit",
                "stop other programs, or raise the container's memory limit",
            )


def plan_of(path: str) -> Plan:
    """Plan of a model's memory. Raises what `llamacli.model.need_of` raises."""
    need = need_of(path, installed_plugins())
    return Plan(path, need.weights, need.cache, system.fits(need.n_bytes))


def try_model(model: Model, path: str, n_tokens: int = 64) -> Trial:
    """Evaluate a prompt of token ids twice, and measure the second time."""
    with model.create_session(n_ctx=n_tokens, reuse=False) as session:
        tokens = [i % model.config.n_vocab for i in range(n_tokens)]
        session.eval(tokens)
        session.rewind(0)
        started = time.perf_counter()
        session.eval(tokens)
        seconds = time.perf_counter() - started
    return Trial(path, model.arch, n_tokens, n_tokens / max(seconds, 1e-9), model.program.timings.shares())


def examine(
    plugins: tuple[PluginInfo, ...],
    root: Path = ROOT,
    plan: Plan | None = None,
    trial: Trial | None = None,
    failure: str | None = None,
) -> Report:
    """Collect the report; `root` holds `proc` and `sys`."""
    (total, free), copies = system.system_memory() or (None, None), packed_copies.copies()
    return Report(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        cpu=Cpu(
            name=system.cpu_name(root) or platform.processor() or platform.machine(),
            n_cpus=os.cpu_count() or 1,
            cores=system.usable_cores(root),
            isa=isa(),
            available=available(),
            governor=system.cpu_governor(root),
            load=system.load_average(),
        ),
        memory=Memory(total, free, system.memory_limit(root), system.huge_pages(root)),
        kernels=_kernels(),
        jit_disabled=engine.jit_disabled(),
        plugins=plugins,
        copies=Copies(len(copies), sum(copy.n_bytes for copy in copies), packed_copies.limit()),
        plan=plan,
        trial=trial,
        failure=failure,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _kernels() -> KernelCache:
    folder, kernels = cache_directory(), catalog()
    if folder is None:
        return KernelCache(None, False, 0, 0, len(kernels))
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.kernel")}
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return KernelCache(
        folder=str(folder),
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        n_bytes=sum(sizes.values()),
        n_compiled=sum(kernel.is_cached for kernel in kernels),
        n_kernels=len(kernels),
    )
