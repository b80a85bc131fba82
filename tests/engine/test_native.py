"""Slices of a step table, between which Ctrl-C is handled."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, load_model
from llamacli.engine import native
from llamacli.kernels import prefetch, team
from llamacli.plugins import Plugins

TOKENS = np.random.default_rng(3).integers(0, 128, 200).tolist()


@pytest.mark.parametrize("slice_work", [1.0, 1e5, 1e6])
@pytest.mark.parametrize("variant", ["gqa", "moe_8_2"])
def test_logits_do_not_depend_on_slices(
    variant: str, slice_work: float, tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_gguf(variant), "auto", plugins=plugins, engine=native.NativeEngine())
    with model.create_session() as session:
        expected = session.eval(TOKENS, all_logits=True)
    monkeypatch.setattr(native, "_SLICE_WORK", slice_work)
    with model.create_session() as session:
        np.testing.assert_array_equal(session.eval(TOKENS, all_logits=True), expected)


def test_share_of_a_batch_grows_between_slices(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if request.config.pluginmanager.hasplugin("llamacli.testing.guarded"):
        pytest.skip("guarded programs are compiled for each batch size")
    model = load_model(tiny_gguf("gqa"), "auto", plugins=plugins, engine=native.NativeEngine())
    monkeypatch.setattr(native, "_SLICE_WORK", 1.0)
    timings, shares, run = model.program.timings, [], model.program._team.run

    def watched(*args: object) -> None:
        shares.append(timings.batch_share)
        run(*args)

    monkeypatch.setattr(model.program._team, "run", watched)
    with model.create_session() as session:
        session.eval(TOKENS)
    assert shares == sorted(shares)
    assert 0.0 == shares[0] < shares[-1] < 1.0
    assert timings.batch_share == 0.0


def test_threads_that_cannot_be_started_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(InvalidRequestError, match=r"cannot start 63 threads: can't start.*a smaller number"):
        native._shared_team(63)
    monkeypatch.undo()
    assert native._shared_team(1).n_threads == 1


def test_an_unknown_cpu_tries_prefetch_distances_once(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny_gguf("gqa")
    with load_model(path, "auto", plugins=plugins, engine=native.NativeEngine()).create_session() as session:
        expected = session.eval(TOKENS, all_logits=True)
    ran, run_kernel = list[int](), team.run_kernel

    def watched(*args: Any, ahead: int, **params: Any) -> None:
        ran.append(ahead)
        run_kernel(*args, ahead=ahead, **params)

    monkeypatch.setattr(prefetch, "run_kernel", watched)
    monkeypatch.setattr(prefetch, "_TRIAL_BYTES", 1 << 10)
    monkeypatch.setattr(prefetch, "host", lambda: ("", "unheard-of", ""))
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    for expected_runs in (3 * [*prefetch.DISTANCES], []):
        ran.clear()
        with load_model(path, "auto", plugins=plugins, engine=native.NativeEngine()).create_session() as session:
            np.testing.assert_array_equal(session.eval(TOKENS, all_logits=True), expected)
        assert ran[-12:] == expected_runs
