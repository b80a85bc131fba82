"""Instruction sets, threads, and the folder of compiled kernels."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from llamacli.errors import InvalidRequestError
from llamacli.kernels import isa
from llamacli.kernels.elementwise import ADD, add
from llamacli.kernels.team import Team, check_threads
from running import run_kernel

PROGRAM = """
import logging, sys, llamacli
logging.basicConfig()
with llamacli.load_model(sys.argv[1], threads=int(sys.argv[2])) as model, model.create_session() as session:
    print([token.id for token in session.generate([1, 5, 9], max_tokens=12)])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("team") / "model.gguf", type="Q8_0")


def generate(model: Path, threads: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(threads)], env=os.environ | env, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


def sums(team: Team, n: int) -> np.ndarray:
    a = np.arange(n * 64, dtype=np.float32).reshape(n, 64)
    out = np.zeros_like(a)
    run_kernel(team, add, ADD, n_rows=n, a=a, b=a, out=out, stride=a.strides[0], n_blocks=2)
    return out / 2 - a


@pytest.mark.parametrize("name", ["sse", "AVX2", "avx512 "])
def test_an_unknown_instruction_set_is_refused(monkeypatch, name):
    monkeypatch.setenv(isa.VARIABLE, name)
    with pytest.raises(InvalidRequestError, match=r"LLAMACLI_ISA = .* is not one of generic, avx2"):
        isa.isa.__wrapped__()


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setenv(isa.VARIABLE, "avx512")
    monkeypatch.setattr(isa, "features", frozenset)
    with pytest.raises(InvalidRequestError, match="this CPU runs only generic"):
        isa.isa.__wrapped__()
    monkeypatch.delenv(isa.VARIABLE)
    assert isa.isa.__wrapped__() == "generic"


@pytest.mark.parametrize("threads", [0, -1, 10**6, True, 1.5])
def test_impossible_numbers_of_threads_are_refused(threads):
    with pytest.raises(InvalidRequestError, match="is not a number from 1 to"):
        check_threads(threads)


def test_every_unit_of_work_is_done_once_whatever_the_number_of_threads():
    for n_threads in (1, 2, 3, 7):
        team = Team(n_threads)
        for n in (1, 2, 5, 50):
            assert not sums(team, n).any()
        team.close()


def test_python_threads_take_turns():
    team, failures = Team(2), []

    def work() -> None:
        for n in range(1, 60):
            if sums(team, n).any():
                failures.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    team.close()
    assert not failures


def test_text_does_not_depend_on_threads_or_instruction_set(model):
    expected = generate(model)
    assert expected.returncode == 0, expected.stderr
    for threads in (1, len(os.sched_getaffinity(0))):
        assert generate(model, threads).stdout == expected.stdout
    assert generate(model, LLAMACLI_ISA="generic").stdout == expected.stdout
