"""Options of workers of `run`."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacli.plugins import Plugins
from llamacli.stages.worker import Worker, listen

SECRET = b"a secret of the tests"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """File with the secret."""
    path = tmp_path / "secret"
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(SECRET)
    return path


@pytest.fixture
def address(model: Path, plugins: Plugins, invoke) -> Iterator[str]:
    """Address of a worker of the model, without kernels."""
    with listen(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=Worker(model, SECRET, plugins=plugins).serve, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


ARGS = ("--raw", "-n", "6", "--temp", "0")


def test_texts_are_those_of_one_process(model: Path, secret: Path, address: str, invoke) -> None:
    expected = invoke("run", model, "the end", *ARGS)
    assert expected.exit_code == 0
    assert expected.stdout
    for mode in ((), ("--split-mode", "layer"), ("-sm", "row")):
        found = invoke("run", model, "the end", *ARGS, "--workers", address, "--secret-file", secret, *mode)
        assert (found.exit_code, found.stdout) == (0, expected.stdout), found.stderr


@pytest.mark.parametrize("mode", ["none", "layer", "row"])
def test_without_workers_a_split_mode_has_no_effect(mode: str, model: Path, invoke) -> None:
    found = invoke("run", model, "the end", *ARGS, "-sm", mode)
    assert found.exit_code == 0
    assert found.stdout == invoke("run", model, "the end", *ARGS).stdout
    assert "note: without effect: --split-mode (there are no --workers)" in found.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--workers", "127.0.0.1:1", "-sm", "none"),
            "--split-mode none: --workers divide the model, by layer or",
        ),
        (("--workers", "127.0.0.1:1", "-sm", "tensor"), "'tensor' is not one of 'layer', 'row', 'none'"),
        (("-sm", "row", "-ts", "1,1"), "need --workers HOST:PORT"),
        (
            ("--workers", "127.0.0.1:1", "--prompt-cache", "prompts"),
            "--prompt-cache and --workers exclude each other",
        ),
    ],
)
def test_what_does_not_go_together(given: tuple[str, ...], said: str, model: Path, secret: Path, invoke) -> None:
    found = invoke("run", model, "hi", "--secret-file", secret, *given)
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())


def test_worker_takes_names_of_models(secret: Path, invoke) -> None:
    found = invoke("worker", "demoo", "--secret-file", secret)
    assert found.exit_code == 1
    assert "demoo: no such file, and no short name of a model" in found.stderr
