"""Diagnosis and advice, on simulated systems."""

import attrs
import pytest

from llamacli.ops.rms_norm import rms_norm_kernel
from llamacli.plugins import PluginInfo
from llamacli.tools import doctor
from llamacli.tools.doctor import Cpu, KernelCache, Memory, Plan, Report, Trial, examine, try_model
from llamacli.util import system
from llamacli.util.system import Cores

GOOD = PluginInfo("good", "llamacli-good", "1.0", ("arch",), None)
BROKEN = PluginInfo("bad", "llamacli-bad", "2.0", ("other",), "plugin bad cannot be loaded: ImportError: no")
HEALTHY = Report(
    versions={"python": "3.11"},
    cpu=Cpu("CPU", 8, Cores(8, 4, None), "avx2", ("generic", "avx2"), None, 0.1),
    memory=Memory(1 << 34, 1 << 33, None, "madvise"),
    kernels=KernelCache("/cache", True, 1000, 50, 50),
    jit_disabled=False,
    plugins=(GOOD,),
)


def test_no_advice_for_a_healthy_system() -> None:
    assert HEALTHY.advice() == []


def cpu(**changes: object) -> dict[str, Cpu]:
    return {"cpu": attrs.evolve(HEALTHY.cpu, **changes)}


def memory(**changes: object) -> dict[str, Memory]:
    return {"memory": attrs.evolve(HEALTHY.memory, **changes)}


def kernels(**changes: object) -> dict[str, KernelCache]:
    return {"kernels": attrs.evolve(HEALTHY.kernels, **changes)}


@pytest.mark.parametrize(
    ("changes", "what", "do"),
    [
        ({"plugins": (GOOD, BROKEN)}, "plugin bad cannot be loaded", "uninstall llamacli-bad"),
        ({"plugins": ()}, "no plugin that runs models", "pip install"),
        (
            {"trial": Trial("m", "a", 64, 9.0, {"verb V of p, in layer 0": 0.25, "verb V of p, in layer 1": 0.5})},
            "verb V of p: no kernel, so NumPy takes 75% of the time",
            "docs/plugins.md",
        ),
        ({"plan": Plan("m.gguf", 9, 1, False)}, "m.gguf does not fit the free memory", "smaller quantization"),
        ({"jit_disabled": True}, "NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT"),
        (kernels(n_compiled=3), "47 of 50 kernels are not compiled", "llamacli warmup"),
        (kernels(writable=False), "/cache is not writable", "set LLAMACLI_CACHE"),
        (kernels(writable=False, folder=None), "there is no home directory", "set LLAMACLI_CACHE"),
        (cpu(isa="generic"), "LLAMACLI_ISA selects generic, but this CPU supports avx2", "unset LLAMACLI_ISA"),
        (cpu(isa="generic", available=("generic",)), "no kernels use this CPU's own", "AVX2"),
        (cpu(cores=Cores(8, 4, 1.5)), "quota is 1.5 CPUs: 2 of 4 cores", "CPU limit"),
        (cpu(cores=Cores(3, 2, None)), "allows 3 of 8 CPUs", "taskset"),
        (cpu(governor="powersave"), "frequency is kept low", "performance"),
        (cpu(load=6.25), "load average is 6.2 on 8 CPUs", "-t"),
        (memory(huge_pages="never"), "huge pages are off", "madvise"),
        (memory(free=100 << 20), "only 100 MiB of memory", "stop other programs"),
        (memory(limit=200 << 20), "only 200 MiB of memory", "memory limit"),
    ],
)
def test_advice(changes: dict[str, object], what: str, do: str) -> None:
    advice = attrs.evolve(HEALTHY, **changes).advice()
    assert len(advice) == 1, "and nothing else"
    assert what in advice[0].what
    assert do in advice[0].do


@pytest.mark.parametrize(
    "change",
    [
        cpu(cores=Cores(8, 4, 4.0)), cpu(governor="performance"), cpu(load=None), memory(huge_pages=None),
        memory(total=None, free=None), memory(limit=1 << 32),
    ],
)  # fmt: skip
def test_no_advice(change: dict[str, object]) -> None:
    assert attrs.evolve(HEALTHY, **change).advice() == []


def test_report_of_this_machine() -> None:
    report = examine((GOOD,))
    assert report.versions["numba"]
    assert report.cpu.isa in report.cpu.available
    assert report.kernels.n_kernels > 40
    assert report.as_dict()["threads"] == report.cpu.cores.threads
    assert report.plugins == (GOOD,)


def test_report_of_a_simulated_system(tmp_path, monkeypatch) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU: fast\n\nprocessor\t: 1\nmodel name\t: Other\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "26 25 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": "4096\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "load_average", lambda: 1.5)
    monkeypatch.setattr(system, "system_memory", lambda: (2 << 20, 1 << 20))
    report = examine((), tmp_path)
    assert (report.cpu.name, report.cpu.load, report.cpu.governor) == ("A CPU: fast", 1.5, "powersave")
    assert report.memory == Memory(2 << 20, 1 << 20, 4096, "never")


def test_report_of_a_system_without_proc_and_sys(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(system, "load_average", lambda: None)
    monkeypatch.setattr(system, "system_memory", lambda: None)
    report = examine((), tmp_path)
    assert report.memory == Memory(None, None, None, None)
    assert (report.cpu.load, report.cpu.governor) == (None, None)


def test_report_of_the_kernel_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path / "deep" / "cache"))
    empty = examine(()).kernels
    assert (empty.writable, empty.n_bytes, empty.n_compiled) == (True, 0, 0)
    folder = doctor.cache_directory()
    assert folder is not None
    assert empty.folder == str(folder)
    folder.mkdir(parents=True)
    known = folder / rms_norm_kernel().file_name
    known.write_bytes(bytes(10))
    (folder / "unknown.kernel").write_bytes(bytes(5))
    filled = examine(()).kernels
    assert (filled.n_bytes, filled.n_compiled) == (15, 1)
    monkeypatch.setenv("LLAMACLI_CACHE", str(known))
    assert not examine(()).kernels.writable
    monkeypatch.setattr(doctor, "cache_directory", lambda: None)
    assert examine(()).kernels == KernelCache(None, False, 0, 0, empty.n_kernels)


def test_models_are_tried(load_tiny) -> None:
    trial = try_model(load_tiny("gqa"), "tiny.gguf")
    assert (trial.path, trial.architecture, trial.n_tokens, trial.numpy_shares) == ("tiny.gguf", "llama", 64, {})
    assert trial.tps > 0
