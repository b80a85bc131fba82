"""Fast start: help and usage errors import no heavy modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamacli.cli.app import app
from suite import slow_but

HEAVY = {"numpy", "numba", "regex", "gguf", "pluggy", "attrs", "jinja2", "prompt_toolkit", "llamacli.plugins"}
LOADED = (
    "import sys; sys.argv[0] = 'llamacli'\ntry: from llamacli.cli import main; main()\nfinally: print(*sys.modules)"
)
END = "-- end of a program --\n"
FORKED = f"""
import json, os, sys
from llamacli.cli import main
for arguments in json.loads(sys.argv[1]):
    if not os.fork():
        sys.argv[:] = ["llamacli", *arguments]
        try:
            main()
        finally:
            sys.stderr.flush()
            print(*sys.modules, flush=True)
            os.write(1, {END.encode()!r})
    os.wait()
"""
BUDGET_S = 0.3


@pytest.mark.medium
def test_help_and_usage_errors_import_nothing_heavy(environment: dict[str, str]) -> None:
    """Each line is run by a fork of one program."""
    lines = ["--help", "run --help", "plugins --help", "", "--nonsense", "run --top-k x", "inspect", "model.gguf"]
    command = [sys.executable, "-c", FORKED, json.dumps([line.split() for line in lines])]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    *shown, last = result.stdout.decode().split(END)
    assert last == ""
    assert len(shown) == len(lines)
    for line, one in zip(lines, shown, strict=True):
        assert "Usage: llamacli" in one, line
        assert HEAVY & set(one.splitlines()[-1].split()) == set(), line


@pytest.mark.medium
def test_help_imports_no_command(environment: dict[str, str], thirty_plugins: None) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOADED, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    homes = {entry.module for name, entry in app.commands.entries.items()}
    assert len(homes) > 12
    assert homes & set(result.stdout.splitlines()[-1].split()) == set()
    assert "  dummy7      Print the name.\n" in result.stdout


@pytest.mark.medium
def test_completion_imports_nothing_for_chat(environment: dict[str, str], model: Path) -> None:
    command = [sys.executable, "-c", LOADED, "run", str(model), "once", "-n", "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = set(result.stdout.splitlines()[-1].split())
    assert {"jinja2", "prompt_toolkit", "asyncio", "wcwidth"} & found == set()


@pytest.mark.medium
@pytest.mark.parametrize("command", ["inspect", "plugins"])
def test_commands_without_computing_import_no_compiler(command: str, environment: dict[str, str], model: Path) -> None:
    arguments = [command, str(model)] if command == "inspect" else [command]
    result = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    assert {"numba", "llvmlite.binding"} & set(result.stdout.splitlines()[-1].split()) == set()


@pytest.mark.medium
def test_cached_kernels_run_without_numba_and_llvm(environment: dict[str, str], model: Path) -> None:
    """Importing them would take half of a short run, and 40 MB."""
    command = [sys.executable, "-c", LOADED, "run", str(model), "once", "-n", "4", "--seed", "1"]
    compiling = environment | {"NUMBA_DISABLE_JIT": "0", "LLAMACLI_CACHE": os.environ["LLAMACLI_CACHE"]}
    for _ in range(2):  # the first run compiles what is not in the cache
        result = subprocess.run(command, env=compiling, capture_output=True, text=True, check=True)
    assert {"numba", "llvmlite.binding"} & set(result.stdout.splitlines()[-1].split()) == set()


COUNTED = """
import gc, os, sys; sys.argv[0] = "llamacli"
from llamacli.cli import main
try: main()
finally: print(gc.get_stats()[0]["collections"], os.environ["OPENBLAS_THREAD_TIMEOUT"])
"""


@pytest.mark.medium
@pytest.mark.parametrize(("given", "kept"), [({}, "4"), ({"OPENBLAS_THREAD_TIMEOUT": "20"}, "20")])
def test_start_spends_little_time_besides_its_work(
    given: dict[str, str], kept: str, environment: dict[str, str], model: Path
) -> None:
    """Few collections of garbage; threads of NumPy that sleep soon."""
    command = [sys.executable, "-c", COUNTED, "run", str(model), "once", "-n", "1"]
    result = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    collections, timeout = result.stdout.splitlines()[-1].split()[-2:]
    assert timeout == kept
    assert int(collections) < 80


def test_help_is_fast(program) -> None:
    def cpu_s() -> float:
        before = os.times()
        assert program("--help").returncode == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_s() for _ in range(5)) < BUDGET_S  # processor time: the machine may be busy


PLUGIN = """
import click
@click.command()
def command():
    \"\"\"Print the name.\"\"\"
    print("{name}")
"""


@pytest.fixture
def thirty_plugins(site: Path, install) -> None:
    """Install 30 plugins, each with an architecture and a command."""
    for number in range(30):
        name = f"dummy{number}"
        entries = f"[llamacli.architectures]\n{name} = {name}\n[llamacli.commands]\n{name} = {name}:command\n"
        install(site, f"llamacli-{name}", entries, **{name: PLUGIN.replace("{name}", name)})


@pytest.mark.medium
@pytest.mark.parametrize("arguments", ["--help", "run --help", "plugins --help", "trace --help"])
def test_help_imports_no_plugin_and_no_more_modules(
    arguments: str, environment: dict[str, str], thirty_plugins: None
) -> None:
    """Count the imports: time says more about what else the machine does."""

    def loaded(**changes: str) -> set[str]:
        command = [sys.executable, "-c", LOADED, *arguments.split()]
        result = subprocess.run(command, env=environment | changes, capture_output=True, text=True, check=True)
        return set(result.stdout.splitlines()[-1].split())

    packages = environment["PYTHONPATH"].split(os.pathsep)[1:]
    assert loaded() == loaded(PYTHONPATH=os.pathsep.join(packages))


@pytest.mark.medium
def test_command_of_a_plugin_imports_no_model_code(environment: dict[str, str], thirty_plugins: None) -> None:
    command = [sys.executable, "-c", LOADED, "dummy7"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[0] == "dummy7"
    assert {"numba", "gguf", "tokenizers"} & set(result.stdout.splitlines()[-1].split()) == set()


@pytest.mark.medium
def test_running_a_model_imports_no_other_architecture(
    environment: dict[str, str], model: Path, site: Path, install
) -> None:
    install(site, "llamacli-other", "[llamacli.architectures]\nother = other_plugin\n", other_plugin="raise OSError")
    command = [sys.executable, "-c", LOADED, "run", str(model), "once", "-n", "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "other_plugin" not in result.stdout.splitlines()[-1].split()
    assert result.stderr.count("OSError") == 0


@pytest.mark.usefixtures("broken_plugin")
def test_broken_plugin_affects_neither_help_nor_run(program, model: Path) -> None:
    result = program("--help")
    assert (result.returncode, result.stderr) == (0, "")
    result = program("run", model, "-n", "3", "Once")
    assert result.returncode == 0
    assert result.stdout.startswith("Once")
    assert "Traceback" not in result.stderr


def test_version(program, site: Path, install) -> None:
    install(site, "llamacli_core", "")
    result = program("--version")
    assert (result.returncode, result.stdout) == (0, "llamacli, version 1.0\n")


BEGUN = """
import json, os, sys
from llamacli.cli import app, progress

def shown(task, interval_s=None):
    print("slow" if {"numpy", "numba"} & sys.modules.keys() else "fast", flush=True)
    raise SystemExit

progress.shown = shown
for args in json.loads(sys.argv[1]):
    if not os.fork():
        app.app(args, prog_name="llamacli")
    os.wait()
"""


@pytest.mark.medium
def test_progress_begins_before_slow_imports(environment: dict[str, str]) -> None:
    """Each command is run by a fork of one program."""
    commands = [
        ["run", "-p", "x"], ["bench"], ["perplexity", "README.md"], ["embed", "README.md", "x"], ["doctor"],
        ["quantize", "README.md", "x.gguf", "Q8_0"], ["warmup"],
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", BEGUN, json.dumps(commands)]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert result.stdout == "fast\n" * len(commands), result.stderr


INTERRUPTING = """
import os, signal, sys
from llamacli.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
class Interrupting:
    left = int(sys.argv.pop(1))
    def find_spec(self, *_):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv[0] = "llamacli"
main()
"""


@pytest.mark.medium
@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("n", slow_but([150], [1, 30, 150, 260, 420]))
def test_interrupts_while_modules_are_imported_are_one_line(
    n: int, command: str, environment: dict[str, str], model: Path
) -> None:
    """SIGINT while the n-th module is looked up."""
    options = ["once", "-n", "1"] if command == "run" else ["--port", "0"]
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, str(n), command, str(model), *options],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.count("\n") <= 1, result.stderr
