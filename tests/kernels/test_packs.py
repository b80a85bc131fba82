"""Kernel packs: what is loaded from them, and what is not."""

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arm import ArmObject
from llamacli.kernels import jit, packs
from llamacli.kernels.isa import isa
from llamacli.kernels.jit import Compiled, fingerprint
from llamacli.kernels.layout import RUN
from llamacli.kernels.packs import pack_name, packed, with_checksum, without_checksum
from llamacli.ops.norms import NORM
from llamacli.ops.rms_norm import rms_norm_kernel

SIGNATURE = "int64(int64)"


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def entry(function: Callable[[int], int]) -> tuple[str, bytes]:
    kernel = Compiled(function, SIGNATURE)
    return kernel.file_name, kernel.make_entry()


@pytest.fixture(scope="module")
def entries() -> dict[str, bytes]:
    return dict(map(entry, (double, triple)))


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entries: dict[str, bytes]) -> Path:
    """A pack of two kernels, installed; the cache is empty."""
    folder = tmp_path / packs.PACKAGE
    folder.mkdir(0o700)
    (folder / "__init__.py").touch()
    file = folder / pack_name(isa())
    file.write_bytes(packed(fingerprint(), entries))
    file.chmod(0o644)
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    packs._pack.cache_clear()
    packs._say.cache_clear()
    return file


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names of the kernels that are compiled, as they are."""
    caplog.set_level(logging.INFO, "llamacli")
    names: list[str] = []
    monkeypatch.setattr(jit, "listeners", [names.append])
    return names


def call(function: Callable[[int], int]) -> int:
    """Result of freshly compiled or loaded machine code."""
    return Compiled(function, SIGNATURE).call(7)


def test_kernels_of_a_pack_are_loaded(pack: Path, compiled: list[str], caplog) -> None:
    assert (call(double), call(triple)) == (14, 21)
    assert (compiled, caplog.records) == ([], [])
    assert not (pack.parents[1] / "cache").exists(), "nothing has to be written"


def test_the_users_cache_comes_first(pack: Path, compiled: list[str], entries: dict[str, bytes]) -> None:
    kernel = Compiled(double, SIGNATURE)
    folder = jit.cache_directory()
    assert folder
    folder.mkdir(mode=0o700, parents=True)
    (folder / kernel.file_name).write_bytes(entries[Compiled(triple, SIGNATURE).file_name])
    assert call(double) == 21, "the code of another kernel, to tell them apart"
    (folder / kernel.file_name).write_bytes(b"damaged")
    assert call(double) == 14
    assert compiled == []


def test_what_is_not_in_a_pack_is_compiled(pack: Path, compiled: list[str], caplog, entries) -> None:
    del (rest := dict(entries))[Compiled(double, SIGNATURE).file_name]
    pack.write_bytes(packed(fingerprint(), rest))
    assert (call(double), call(triple)) == (14, 21)
    assert compiled == ["double"]
    assert not [record for record in caplog.records if packs.PACKAGE in record.message], "as a plugin's kernel is"


def flip(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)

    return damage


def retarget(file: Path) -> None:
    data = without_checksum(file.read_bytes())
    assert data
    line, _, rest = data.partition(b"\n")
    head = json.loads(line) | {"target": "0123456789abcdef"}
    file.write_bytes(with_checksum(json.dumps(head).encode() + b"\n" + rest))


def age(file: Path) -> None:
    data = without_checksum(file.read_bytes())
    assert data
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    head["entries"] = {f"{name.partition('-')[0]}-0123456789abcdef.kernel": at for name, at in head["entries"].items()}
    file.write_bytes(with_checksum(json.dumps(head).encode() + b"\n" + rest))


def give(file: Path) -> None:
    os.chown(file, 54321, -1)


def link_of_another_user(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")
    os.chown(file, 54321, -1, follow_symlinks=False)


def link_to_shared(file: Path) -> None:
    shared = file.parents[1] / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    file.rename(shared / "file")
    file.symlink_to(shared / "file")


BAD = {
    "empty": (lambda file: file.write_bytes(b""), "is damaged"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
    "half": (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), "is damaged"),
    "flipped-checksum": (flip(0), "is damaged"),
    "flipped-head": (flip(40), "is damaged"),
    "flipped-code": (flip(-20), "is damaged"),
    "other-cpu": (retarget, "is for another CPU"),
    "other-version": (age, "is of another version"),
    "file-mode": (lambda file: file.chmod(0o666), "other users can write to it"),
    "folder-mode": (lambda file: file.parent.chmod(0o777), "other users can write to it"),
    "outer-folder-mode": (lambda file: file.parents[1].chmod(0o777), "other users can write to it"),
    "owner": (give, "other users can write to it"),
    "link": (link_of_another_user, "other users can write to it"),
    "shared-link": (link_to_shared, "other users can write to it"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", BAD)
def test_bad_packs_are_not_used(kind: str, pack: Path, compiled: list[str], caplog, monkeypatch) -> None:
    """Kernels are compiled, which is said once at level INFO."""
    damage, reason = BAD[kind]
    if kind in ("owner", "link"):
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    damage(pack)
    monkeypatch.setenv("LLAMACLI_CACHE", "/proc/none")  # nothing can be written there
    assert (call(double), call(triple)) == (14, 21)
    assert compiled == ["double", "triple"]
    said = [record for record in caplog.records if packs.PACKAGE in record.message]
    assert [record.levelname for record in said] == ["INFO"]
    assert reason in said[0].message


def test_pack_of_another_instruction_set_is_not_read(pack: Path, compiled: list[str]) -> None:
    other = "avx2" if isa() != "avx2" else "avx512"
    pack.rename(pack.with_name(pack_name(other)))
    assert call(double) == 14
    assert compiled == ["double"]


def test_code_for_another_version_of_numba_is_compiled(pack: Path, compiled: list[str], entries) -> None:
    """Only code that calls functions of Numba is bound to its version."""
    changed = {}
    for name, data in entries.items():
        whole = without_checksum(data)
        assert whole
        line, _, code = whole.partition(b"\n")
        symbol, needs, numba = json.loads(line)
        assert numba is None
        changed[name] = with_checksum(json.dumps((symbol, needs, "0.1")).encode() + b"\n" + code)
    pack.write_bytes(packed(fingerprint(), changed))
    assert call(double) == 14
    assert compiled == ["double"]


WITHOUT_NUMBA = """
import sys, os
from llamacli.kernels.jit import Compiled, listeners
listeners.append(print)
def double(x): return 2 * x
double.__module__ = "test_packs"
print(Compiled(double, "int64(int64)", module="test_packs").call(7), "numba" in sys.modules)
"""


@pytest.mark.medium
def test_code_of_a_pack_needs_no_import_of_numba(pack: Path, tmp_path: Path) -> None:
    """Where the user has no folder for a cache either."""
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": paths, "LLAMACLI_CACHE": "/proc/none"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("14 False\n", "")


X86_64, ARM = 62, 183
"""Numbers of machines in ELF's header."""

BUILT = """
import sys
from pathlib import Path
import kernel_packs
from llamacli.engine import catalog
whole = catalog.catalog
catalog.catalog = lambda: [kernel for kernel in whole() if kernel.name in ("rms_norm", "_run_job", "store_kv_f16")]
kernel_packs.write(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "machine"), [("avx2", X86_64), pytest.param("amx", X86_64, marks=pytest.mark.slow), ("i8mm", ARM)]
)
def test_packs_are_compiled_for_cpus_that_are_not_there(name: str, machine: int, tmp_path: Path) -> None:
    file = tmp_path / pack_name(name)
    command = [sys.executable, "-c", BUILT, str(file), name]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = without_checksum(file.read_bytes())
    assert whole
    head = json.loads(whole.partition(b"\n")[0])
    made = packs.Pack(file, head["target"])
    assert {name.partition("-")[0] for name in head["entries"]} == {"rms_norm", "_run_job", "store_kv_f16"}
    assert (head["target"] == fingerprint()) == (name == isa())
    code = {}
    for file_name in head["entries"]:
        line, _, compiled = (without_checksum(made.entry(file_name)) or b"").partition(b"\n")
        code[file_name.partition("-")[0]] = json.loads(line)[0], compiled
        assert int.from_bytes(compiled[18:20], "little") == machine
    if machine == ARM:
        check_in_emulator(*code["rms_norm"])


def check_in_emulator(symbol: str, code: bytes) -> None:
    """Compare the bits of an ARM norm with this CPU's."""
    pytest.importorskip("unicorn")
    n_rows, width = 3, 64
    x = np.random.default_rng(0).normal(size=(n_rows, width)).astype(np.float32)
    weight, args, run = np.linspace(0.5, 2, width, dtype=np.float32), np.zeros(1, NORM), np.zeros(1, RUN)
    for name, value in {
        "x": x.ctypes.data, "stride": x.strides[0], "weight": weight.ctypes.data, "n_heads": 1, "head_dim": width,
        "eps": 1e-5,
    }.items():  # fmt: skip
        args[name] = value
    run["n_rows"] = n_rows
    results = []
    for function in (ArmObject(code, symbol), rms_norm_kernel().call):
        out = np.zeros_like(x)
        args["out"] = out.ctypes.data
        function(args.ctypes.data, run.ctypes.data, 0, 1)
        results.append(out)
    assert np.abs(results[0]).min() > 0
    np.testing.assert_array_equal(*results)
