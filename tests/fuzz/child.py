"""Child process of the fuzzer: tries cases of one target."""

import argparse
import ast
import faulthandler
import hashlib
import importlib
import logging
import os
import random
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

from fuzz.target import Target
from fuzz.watch import Watch
from llamacli.errors import LlamaCliError, PluginError, UnknownArchitectureError


def find_target(name: str) -> Target:
    """Target by the name `MODULE:KEY` of an entry in a module's TARGETS."""
    module, _, key = name.rpartition(":")
    found: Target = importlib.import_module(module).TARGETS[key]
    return found


class Trier:
    """Tries cases one by one, and keeps those that fail."""

    def __init__(self, name: str, folder: Path, findings: Path, n: int):
        self._target, self._findings = find_target(name), findings
        self._name, self._n = name.rpartition(":")[2], n
        self.watch = Watch(folder / "watch")
        files = folder / "files"
        files.mkdir(exist_ok=True)
        os.chdir(files)
        self._try = self._target.start(files)
        self._first = 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (self._target.memory, self._target.memory))
        warnings.simplefilter("error", RuntimeWarning)

    def __call__(self, case: Any) -> None:
        """Try a case; unexpected exceptions are written to the folder of findings."""
        self.watch.begin(repr(case))
        refused = False
        try:
            self._try(case)
        except Exception as error:
            refused = is_refusal(error)
            if not refused:
                keep(self._findings, self._name, repr(case), _place(error), traceback.format_exc())
        self.watch.end(refused=refused)
        if self.watch.n_done >= self._n // 4 and not self.watch.n_done % 64:
            self._first = self._first or resident()
            self.watch.grown(resident() - self._first)


def is_refusal(error: Exception) -> bool:
    """Test that an error says what is wrong with a case.

    A PluginError says that of a plugin, and the tree's own have no faults that a case could show.
    """
    return isinstance(error, LlamaCliError) and (
        not isinstance(error, PluginError) or isinstance(error, UnknownArchitectureError)
    )


def resident() -> int:
    """Resident set in bytes, without pages of files."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (isinstance(error, PluginError) and error.line) or f"{frame.filename}:{frame.lineno}"
    return f"{type(error).__name__} at {Path(place).name}"


def keep(findings: Path, target: str, case: str, summary: str, details: str) -> Path:
    """Write a finding to a file.

    The first of those with one summary stays.
    """
    name = f"{target}-{hashlib.sha256(summary.encode()).hexdigest()[:10]}.txt"
    findings.mkdir(parents=True, exist_ok=True)
    path = findings / name
    if not path.exists():
        path.write_text(f"{summary}\n{case}\n\n{details}", encoding="utf-8", errors="surrogatepass")
    return path


def case_of(finding: Path) -> Any:
    """Case in a file of the folder of findings."""
    return ast.literal_eval(finding.read_text(encoding="utf-8", errors="surrogatepass").splitlines()[1])


def run_hypothesis(trier: Trier, cases: Any, n: int, seed: int) -> None:
    """Try n cases of a strategy."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(cases)
    def attempt(case: Any) -> None:
        trier(case)

    attempt()


def run_bytes(trier: Trier, cases: Any, n: int, seed: int) -> None:
    """Try up to n cases of a strategy, made of random bytes.

    Several times as fast as `run_hypothesis`.
    """

    @hypothesis.settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(cases)
    def attempt(case: Any) -> None:
        trier(case)

    chance = random.Random(seed)
    for _ in range(n):
        attempt.hypothesis.fuzz_one_input(chance.randbytes(_BYTES))


_BYTES = 4096
"""Bytes of which a case is made; what it does not need is ignored."""


def run_drawn(trier: Trier, draw: Callable[[random.Random], Any], n: int, seed: int) -> None:
    """Try n cases drawn by a target's own function."""
    chance = random.Random(seed)
    for _ in range(n):
        trier(draw(chance))


def run_atheris(trier: Trier, cases: Any, n: int, seed: int, corpus: Path) -> None:
    """Try n cases made by atheris, guided by the core's coverage."""
    import atheris

    @hypothesis.settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(cases)
    def attempt(case: Any) -> None:
        trier(case)

    for name, module in list(sys.modules.items()):
        if name.startswith("llamacli.") and not name.startswith(("llamacli.kernels", "llamacli.tokenizer.kernels")):
            for value in vars(module).values():
                if callable(value) and getattr(value, "__module__", "") == name and hasattr(value, "__code__"):
                    atheris.instrument_func(value)
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={n}", f"-seed={seed % (1 << 31) or 1}", "-verbosity=0", f"-max_len={_BYTES}", "-timeout=600"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], attempt.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> None:
    """Entry point of the child process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("findings", type=Path)
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--hypothesis", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("llamacli").setLevel(logging.CRITICAL)
    trier = Trier(given.target, given.folder, given.findings, given.cases)
    target = find_target(given.target)
    if given.replay:
        trier(case_of(given.replay))
    elif given.corpus:
        run_atheris(trier, target.cases, given.cases, given.seed, given.corpus)
    elif given.hypothesis:
        run_hypothesis(trier, target.cases, given.cases, given.seed)
    elif target.draw:
        run_drawn(trier, target.draw, given.cases, given.seed)
    else:
        run_bytes(trier, target.cases, given.cases, given.seed)


if __name__ == "__main__":
    main()
