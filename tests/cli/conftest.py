"""Fixtures for the command line: in this process, and as a program."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import llamacli
import llamacli.engine
import llamacli.model
import llamacli.plugins
import llamacli_llama
from llamacli.cli.app import app
from llamacli.plugins import Plugins

Invoke = Callable[..., click.testing.Result]
Install = Callable[..., None]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def model(tiny_gguf: Callable[..., Path]) -> Path:
    """A model with a vocabulary and a context of 64 tokens."""
    return tiny_gguf("gqa", tokenizer="spm", context_length=64)


@pytest.fixture
def use_plugins(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plugins], None]:
    """Replace the installed plugins."""

    def use(plugins: Plugins) -> None:
        for module in (llamacli.plugins, llamacli.model):
            monkeypatch.setattr(module, "installed_plugins", lambda: plugins)

    return use


@pytest.fixture
def invoke(use_plugins: Callable[[Plugins], None], plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line in this process with the llama plugin installed.

    Stdin is empty and not a terminal.
    Models run without kernels, so that nothing is compiled.
    """
    use_plugins(plugins)
    # Not by NUMBA_DISABLE_JIT: Numba reads that again at times, and what it compiled before would no longer fit.
    monkeypatch.setattr(llamacli.engine, "jit_disabled", lambda: True)

    def run(*args: str | Path, **options: Any) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(app, list(map(str, args)), prog_name="llamacli", **options)
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return result

    return run


@pytest.fixture
def install() -> Install:
    """Install a distribution with these entry points and modules into a directory."""

    def write(site: Path, name: str, entry_points: str, **modules: str) -> None:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)

    return write


@pytest.fixture
def site(tmp_path: Path, install: Install) -> Path:
    """Directory of the program's plugins, with the llama family installed."""
    site = tmp_path / "site"
    install(site, "llamacli-llama", "[llamacli.architectures]\nllama = llamacli_llama\n")
    return site


@pytest.fixture
def broken_plugin(site: Path, install: Install) -> None:
    """Install a plugin whose import fails, in both groups."""
    entries = "[llamacli]\nbroken = broken_plugin\n[llamacli.architectures]\nbroken = broken_plugin\n"
    install(site, "llamacli-broken", entries, broken_plugin="import no_such_module\n")


@pytest.fixture
def environment(site: Path) -> dict[str, str]:
    """Environment variables of the program; models run without kernels."""
    packages = [Path(package.__file__).parents[1] for package in (llamacli, llamacli_llama)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMACLI", "PYTHON"))}
    path = os.pathsep.join(map(str, [site, *packages]))
    return inherited | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "NUMBA_DISABLE_JIT": "1"}


@pytest.fixture
def sigint_enabled() -> Iterator[None]:
    """Start programs with SIGINT enabled, even in background test runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(environment: dict[str, str], sigint_enabled: None) -> Iterator[Start]:
    """Start `llamacli` as a program, by default with pipes.

    It is killed at the end of the test.
    """
    with contextlib.ExitStack() as started:

        def popen(*args: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            command = [sys.executable, "-m", "llamacli", *map(str, args)]
            process = subprocess.Popen(command, env=environment | (env or {}), **(streams | options))
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield popen


@pytest.fixture
def program(start: Start) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `llamacli` as a program until it ends."""

    def run(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        process = start(*args, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(args, process.returncode, (out or b"").decode(), (err or b"").decode())

    return run
