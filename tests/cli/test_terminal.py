"""The program with pipes, signals and terminals."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ENDLESS = ("--ignore-eos", "-c", "1000000", "--temp", "0")
TIMEOUT_S = 60


@pytest.fixture(params=["0", "1"], ids=["kernels", "no kernels"])
def endless(request, start, model: Path):
    """Start a run that generates for hours."""

    def begin(*args: str, **options) -> subprocess.Popen[bytes]:
        return start("run", model, "once", *ENDLESS, *args, env={"NUMBA_DISABLE_JIT": request.param}, **options)

    return begin


def lines_but_warnings(stderr: bytes) -> list[str]:
    """Lines of stderr without warnings."""
    return [line for line in stderr.decode().splitlines() if not line.startswith("llamacli: warning: ")]


def read_until(fd: int, wanted: bytes) -> bytes:
    """Read from a file descriptor until `wanted` has come."""
    data = b""
    deadline = time.monotonic() + TIMEOUT_S
    while wanted not in data:
        assert select.select([fd], [], [], deadline - time.monotonic())[0], f"{wanted!r} did not come after {data!r}"
        data += os.read(fd, 65536)
    return data


def test_interrupted_text_ends_its_line_and_prints_stats(endless) -> None:
    process = endless("--stats")
    begun = process.stdout.read(200)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert begun.startswith(b"once")
    assert out.endswith(b"\n")
    assert [line.split()[0] for line in lines_but_warnings(err)] == [
        "load",
        "prompt",
        "first",
        "generated",
        "peak",
        "seed",
    ]


@pytest.fixture
def meddling(site: Path, install):
    """Install a plugin that runs code after a model is loaded."""

    def write(code: str) -> None:
        source = f"from llamacli import hookimpl\nLLAMACLI_API = 1\n{code}\n@hookimpl\ndef model_loaded(): meddle()\n"
        install(site, "llamacli-meddling", "[llamacli]\nmeddling = meddling_plugin\n", meddling_plugin=source)

    return write


def test_interrupt_lost_in_a_destructor_is_handled(program, meddling, model: Path) -> None:
    meddling("""
import os, signal
class Passing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(100))
def meddle(): Passing()
""")
    result = program("run", model, "once", "-n", "3")
    assert (result.returncode, result.stdout, result.stderr) == (130, "once\n", "")


def test_interrupt_does_not_wait_for_threads(start, meddling, model: Path) -> None:
    meddling("""
import threading
def meddle(): threading.Thread(target=threading.Event().wait).start()
""")
    process = start("run", model, "once", *ENDLESS)
    process.stdout.read(100)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert out.endswith(b"\n")


def test_interrupted_json_is_complete(endless) -> None:
    process = endless("--json", "-v")
    read_until(process.stderr.fileno(), b" loaded in ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in err
    answer = json.loads(out)
    assert answer["stop"] == "interrupt"
    assert answer["stats"]["n_gen"] <= len(answer["tokens"]) <= answer["stats"]["n_gen"] + 1


def test_interrupt_while_reading_stdin(start, model: Path) -> None:
    process = start("run", model, stdin=subprocess.PIPE)
    assert read_until(process.stderr.fileno(), b"\n").startswith(b"llamacli: reading text from stdin until it ends")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, b"", b"\n")


def test_closed_pipe_ends_quietly(endless) -> None:
    process = endless()
    assert process.stdout.read(10) != b""
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(TIMEOUT_S) == 141
    assert lines_but_warnings(err) == []


@pytest.mark.medium
def test_pipe_to_head(environment, model: Path) -> None:
    script = 'python() { "$PYTHON" -m llamacli "$@"; }; python run "$MODEL" once --ignore-eos | head -c 10'
    env = environment | {"PYTHON": sys.executable, "MODEL": str(model)}
    result = subprocess.run(["bash", "-c", script], env=env, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert (result.returncode, len(result.stdout)) == (0, 10)
    assert b"Traceback" not in result.stderr
    assert b"Exception ignored" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["run", "inspect"])
def test_full_disk_is_one_line(command: str, program, model: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = program(command, model, stdout=full)
    assert (result.returncode, result.stderr) == (1, "llamacli: error: No space left on device\n")


def test_unencodable_characters_are_replaced(program, model: Path) -> None:
    result = program("run", model, "once é 日", "-n", "0", env={"PYTHONIOENCODING": "koi8-r"})
    assert (result.returncode, result.stdout, result.stderr) == (0, "once ? ?\n", "")


def test_locale_without_utf8_keeps_text(program, model: Path) -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = program("run", model, "once é 日", "-n", "0", env=env)
    assert (result.returncode, result.stdout, result.stderr) == (0, "once é 日\n", "")


@pytest.mark.medium
def test_closed_streams(environment, model: Path) -> None:
    for redirections in ("<&-", "2>&-", ">&-", "<&- >&- 2>&-"):
        script = f'"$PYTHON" -m llamacli run "$MODEL" -n 2 {redirections}'
        env = environment | {"PYTHON": sys.executable, "MODEL": str(model)}
        result = subprocess.run(["bash", "-c", script], env=env, capture_output=True, check=False, timeout=TIMEOUT_S)
        if ">&-" in redirections.replace("2>&-", ""):
            assert result.returncode == 1, "the text could not be written"
        else:
            assert (result.returncode, result.stderr) == (0, b""), redirections


def test_text_is_streamed(endless) -> None:
    process = endless()
    first = os.read(process.stdout.fileno(), 65536)
    assert first.startswith(b"once")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def terminal():
    """The user's and the program's end of a pseudo-terminal."""
    user, program = pty.openpty()
    yield user, program
    os.close(user)


def test_terminal_as_stdin_is_not_read_and_ctrl_c_works(start, terminal, model: Path) -> None:
    user, tty = terminal
    process = start(
        "run", model, *ENDLESS, stdin=tty, stdout=tty, stderr=tty, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(tty, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(tty)
    read_until(user, b"trained for 64 tokens only\r\n")
    os.read(user, 1)
    os.write(user, b"\x03")
    read_until(user, b"^C")
    assert process.wait(TIMEOUT_S) == 130


def test_usage_errors_are_broken_at_words(start, terminal) -> None:
    user, tty = terminal
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    process = start("quantize", "a.gguf", "b.gguf", "Q9", stderr=tty, env={"TERM": "xterm", "COLUMNS": ""})
    os.close(tty)
    shown = read_until(user, b"Q5_K.").decode().replace("\r\n", "\n")
    assert process.wait(TIMEOUT_S) == 2
    assert "Error: Invalid value for TYPE: unknown\ntype 'Q9'; known are F32, F16, BF16," in shown


def test_tokenize_on_a_terminal_needs_text(start, terminal, model: Path) -> None:
    process = start("tokenize", model, stdin=terminal[1])
    os.close(terminal[1])
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert b"Give TEXT, or pipe it in." in err


def test_unknown_instruction_set_is_one_line(program, model: Path) -> None:
    result = program("run", model, "once", env={"NUMBA_DISABLE_JIT": "0", "LLAMACLI_ISA": "sse9"})
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("llamacli: error: LLAMACLI_ISA = 'sse9' is not one of generic, ")
    assert result.stderr.count("\n") == 1


def test_more_threads_than_cores_is_one_warning(program, model: Path) -> None:
    arguments = ("run", model, "-p", "once", "-n", "5", "--temp", "0")
    crowd = str(os.cpu_count() + 3)
    one, many = (program(*arguments, "-t", n, env={"NUMBA_DISABLE_JIT": "0"}) for n in ("1", crowd))
    assert (many.returncode, many.stdout) == (0, one.stdout)
    warnings = [line for line in many.stderr.splitlines() if "compiling" not in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"llamacli: warning: threads = {crowd}, but this process may use ")
