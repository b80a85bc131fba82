"""Workers over TCP: equal bits, and typed errors for whatever goes wrong."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import Model, load_model
from llamacli.engine.packed_copies import folder
from llamacli.engine.stages import StageBatch
from llamacli.errors import InvalidRequestError, OutOfMemoryError, StageError
from llamacli.hub.demo import demo_path
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import ServeError, StageLostError
from llamacli.serve.models import ModelSource
from llamacli.serve.requests import Failed, GenerationRequest, TextDelta, TokenLogprob
from llamacli.serve.settings import EngineSettings
from llamacli.stages import messages
from llamacli.stages.frames import Connection, Frame
from llamacli.stages.link import SpareList, StagedEngine, Workers
from llamacli.stages.peers import Peers
from llamacli.stages.worker import Worker, listen
from llamacli.util.settings import LoadMode, SplitMode

SECRET = b"a secret of the tests"
TOKENS = [(7 * i + 3) % 90 for i in range(40)]


@contextmanager
def served(
    path: Path, plugins: Plugins, threads: int | None = None, load: LoadMode = LoadMode.AUTO, port: int = 0
) -> Iterator[tuple[str, int]]:
    """Address of a worker on a thread.

    Nodes of one process that divide rows need different `threads`, as a team runs one program at a time.
    """
    with listen(("127.0.0.1", port)) as listener:
        worker = Worker(path, SECRET, threads=threads, load=load, plugins=plugins)
        thread = threading.Thread(target=worker.serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def load(path: Path, plugins: Plugins, *addresses: tuple[str, int], secret: bytes = SECRET, **options: object) -> Model:
    engine = StagedEngine(addresses, secret, **options)  # type: ignore[arg-type]
    return load_model(path, plugins=plugins, engine=engine)


def logits(model: Model) -> np.ndarray:
    with model.create_session(n_ctx=100) as session:
        return np.concatenate([session.eval(TOKENS, all_logits=True), session.eval([5], all_logits=True)])


@pytest.mark.parametrize("variant", ["gqa", "mamba2", "gemma3n_shared", "t5"])
def test_workers_give_equal_bits(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf(variant)
    with served(path, plugins) as one, load(path, plugins, one) as divided, load_model(path, plugins=plugins) as whole:
        found, expected = (model.generate([TOKENS], max_tokens=9)[0].text for model in (divided, whole))
        assert found == expected


@pytest.mark.parametrize("variant", ["gqa", "mamba2", "t5"])
def test_rows_of_products_give_equal_bits(variant: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf(variant)
    with (
        served(path, plugins, threads=2) as one,
        load(path, plugins, one, mode=SplitMode.ROW, threads=1) as divided,
        load_model(path, plugins=plugins) as whole,
    ):
        found, expected = (model.generate([TOKENS], max_tokens=9)[0].text for model in (divided, whole))
        assert found == expected


def test_rows_on_three_nodes(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa", n_layer=3)
    with (
        served(path, plugins, threads=2) as one,
        served(path, plugins, threads=3) as two,
        load_model(path, plugins=plugins) as whole,
    ):
        for split in (None, [1, 1, 2]):  # the second caller comes when the first has left
            with load(path, plugins, one, two, mode=SplitMode.ROW, threads=1, split=split) as divided:
                np.testing.assert_array_equal(logits(divided), logits(whole))


def test_rows_go_on_after_a_node_had_no_memory(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three nodes end the batch, and compute the next one."""
    path, failing = tiny_gguf("gqa"), [OutOfMemoryError(5, 3)]

    def batch_of(frame: Frame) -> Any:
        if failing:
            raise failing.pop()
        return messages.batch_of(frame)

    monkeypatch.setattr("llamacli.stages.nodes.batch_of", batch_of)
    with (
        served(path, plugins, threads=2) as one,
        served(path, plugins, threads=3) as two,
        load_model(path, plugins=plugins) as whole,
        load(path, plugins, one, two, mode=SplitMode.ROW, threads=1) as divided,
    ):
        with pytest.raises(OutOfMemoryError) as raised:
            logits(divided)
        assert (raised.value.asked, raised.value.available) == (5, 3)
        np.testing.assert_array_equal(logits(divided), logits(whole))


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM as an interrupt; SIGINT is ignored in background test runs."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupts")
def test_rows_go_on_after_an_interrupt(tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf("gqa")
    with (
        served(path, plugins, threads=2) as one,
        load_model(path, plugins=plugins) as whole,
        load(path, plugins, one, mode=SplitMode.ROW, threads=1) as divided,
    ):
        begin, interrupted, main = Peers.begin, threading.Event(), threading.get_ident()

        def interrupting(peers: Peers, batch: StageBatch) -> None:
            begin(peers, batch)
            for _ in range(30):  # Python loses one that comes just before it waits
                signal.pthread_kill(main, signal.SIGALRM)
                if interrupted.wait(2):
                    return

        interrupt = Peers.interrupt
        with monkeypatch.context() as patch:
            patch.setattr(Peers, "begin", interrupting)
            patch.setattr(Peers, "interrupt", lambda peers: (interrupt(peers), interrupted.set()))
            with pytest.raises(KeyboardInterrupt):
                logits(divided)
        np.testing.assert_array_equal(logits(divided), logits(whole))


def test_three_nodes_in_the_shares_that_are_asked_for(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa", n_layer=6)
    with (
        served(path, plugins) as one,
        served(path, plugins) as two,
        load_model(path, plugins=plugins) as whole,
        load(path, plugins, one, two, split=[1, 1, 4]) as divided,
    ):
        np.testing.assert_array_equal(logits(divided), logits(whole))


def test_a_worker_serves_one_caller_after_the_other(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa")
    with served(path, plugins) as one:
        with load(path, plugins, one) as first:
            expected = logits(first)
            with pytest.raises(StageError, match="it serves another caller"):
                load(path, plugins, one)
        with load(path, plugins, one) as second:  # it waits until the first one has left
            np.testing.assert_array_equal(logits(second), expected)


@pytest.mark.parametrize("mode", SplitMode)
def test_a_worker_whose_mapped_copy_is_cut_loads_it_again(
    mode: SplitMode, tiny_gguf: TinyGguf, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path)
    path = tiny_gguf("gqa")
    with (
        served(path, plugins, threads=2, load=LoadMode.MAP) as one,
        load_model(path, plugins=plugins, load="memory") as whole,
        load(path, plugins, one, mode=mode, threads=1, load=LoadMode.MEMORY) as divided,
    ):
        expected = logits(whole)
        np.testing.assert_array_equal(logits(divided), expected)
        (copy,) = (tmp_path / "packed").iterdir()
        os.truncate(copy, 4096)
        with pytest.raises(StageError, match=rf"worker 127.0.0.1:{one[1]}: .*{copy} was cut or changed"):
            logits(divided)
        divided.program.renew()
        np.testing.assert_array_equal(logits(divided), expected)


def test_a_wrong_secret_is_refused(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa")
    with served(path, plugins) as one, pytest.raises(StageError, match=f"worker 127.0.0.1:{one[1]}: it refused"):
        load(path, plugins, one, secret=b"another secret of the tests")


def test_another_model_is_refused(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with served(tiny_gguf("gqa"), plugins) as one, pytest.raises(StageError, match="another model file"):
        load(tiny_gguf("gqa", n_layer=6), plugins, one)


def test_another_version_is_refused(tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf("gqa")
    with served(path, plugins) as one:
        monkeypatch.setattr("llamacli.stages.link.version", lambda: "of tomorrow")
        with pytest.raises(StageError, match=f"it runs llamacli {messages.version()}, and this process of tomorrow"):
            load(path, plugins, one)


def test_another_forward_pass_is_refused(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf("gqa")
    with served(path, plugins) as one:
        monkeypatch.setattr("llamacli.stages.link.digest_of", lambda graph: "another")
        with pytest.raises(StageError, match="record different forward passes"):
            load(path, plugins, one)


def test_no_worker_at_an_address(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    with listen(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[:2]
    with pytest.raises(StageError, match=f"worker 127.0.0.1:{free[1]}: the connection is lost"):
        load(tiny_gguf("gqa"), plugins, free)


def test_a_spare_worker_takes_the_place_of_one_that_does_not_answer(
    tiny_gguf: TinyGguf, plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_gguf("gqa")
    with listen(("127.0.0.1", 0)) as listener, listen(("127.0.0.1", 0)) as other:
        free = [one.getsockname()[:2] for one in (listener, other)]
    with (
        served(path, plugins) as spare,
        load_model(path, plugins=plugins) as whole,
        load(path, plugins, free[0], spares=SpareList([free[1], spare])) as divided,
    ):
        np.testing.assert_array_equal(logits(divided), logits(whole))
    for gone, taken in ((free[0], free[1]), (free[1], spare)):
        assert f"worker 127.0.0.1:{gone[1]}: the connection is lost" in caplog.text
        assert f"; worker 127.0.0.1:{taken[1]} takes its place" in caplog.text


def request(number: int) -> GenerationRequest:
    """Request of a kind: greedy, drawn, two texts, with probabilities."""
    kinds: list[dict[str, Any]] = [
        {},
        {"params": SamplingParams(temperature=1.0), "seed": 7},
        {"n": 2, "params": SamplingParams(temperature=1.0)},
        {"prompts": (tuple(TOKENS),), "params": SamplingParams(n_probs=2)},
    ]
    fields = {"prompts": ((1, 2, 3 + number),), "max_tokens": 200, "ignore_eos": True} | kinds[number % len(kinds)]
    return GenerationRequest(id=f"r{number}", model="m", **fields)


async def answers(engine: LocalEngine, n: int, lose: Callable[[], None] = lambda: None) -> list[Any]:
    """Texts with their probabilities, or errors, of n requests at once.

    `lose` is called in a thread when each has sent a text.
    """
    (await engine.pin("m")).release()
    begun, losing = set[str](), list[asyncio.Future[None]]()

    async def one(number: int) -> Any:
        parts: dict[int, tuple[str, tuple[TokenLogprob, ...]]] = {}
        async for event in engine.submit(request(number)):
            match event:
                case Failed(error=error):
                    return error
                case TextDelta(index=index, text=text, tokens=tokens):
                    before = parts.get(index, ("", ()))
                    parts[index] = before[0] + text, before[1] + tokens
                    begun.add(f"r{number}")
                    if len(begun) == n and not losing:
                        losing.append(asyncio.ensure_future(asyncio.to_thread(lose)))
        return parts

    found = await asyncio.wait_for(asyncio.gather(*map(one, range(n))), 100)
    await asyncio.gather(*losing)
    assert losing
    return found


def served_answers(path: Path, workers: Workers | None, *turns: Callable[[], None]) -> list[list[Any]]:
    """Answers to eight requests, with a loss in each turn."""
    limits = EngineSettings(threads=1, n_ctx=300, max_running=8, workers=workers)
    engine = LocalEngine([ModelSource("m", path)], limits)
    try:
        return [asyncio.run(answers(engine, 8, lose)) for lose in turns]
    finally:
        engine.close()


def nothing() -> None:
    """Lose no worker."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gqa", "mamba2", "t5"])
def test_a_spare_worker_replays_the_requests_of_a_lost_one(
    variant: str,
    tiny_gguf: TinyGguf,
    plugins: Plugins,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamacli.stages.worker._TURN_S", 60.0)  # a caller that leaves late costs no spare worker
    path = tiny_gguf(variant) if variant != "gqa" else tiny_gguf("gqa", n_layer=6)
    (expected,) = served_answers(path, None, nothing)
    assert not any(isinstance(answer, ServeError) for answer in expected)
    with served(path, plugins) as one, ExitStack() as lost, ExitStack() as next_lost:
        two, spare = lost.enter_context(served(path, plugins)), next_lost.enter_context(served(path, plugins))
        workers = Workers((two,), SECRET, spares=(spare, one))
        before, replayed = served_answers(path, workers, nothing, lost.close)
        monkeypatch.setattr("llamacli.serve.scheduler.MAX_LOST", 1)
        (failed,) = served_answers(path, workers, next_lost.close)
    assert before == replayed == expected
    assert f"is lost; worker 127.0.0.1:{spare[1]} takes its place" in caplog.text
    errors = [answer for answer in failed if isinstance(answer, StageLostError)]
    assert errors or variant != "gqa"  # texts of a quicker model may end before the loss
    assert all("1 were lost during the request" in str(error) for error in errors)
    assert all(answer in errors or answer == text for answer, text in zip(failed, expected, strict=True))


def status_is(engine: LocalEngine, status: str) -> None:
    """Wait for a state of the engine."""
    for _ in range(2000):
        if engine.stats().status == status:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{engine.stats().status} is not {status}")


def test_a_closed_model_leaves_its_workers_whatever_refers_to_it(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa")
    with ExitStack() as lost, served(path, plugins) as spare:
        one = lost.enter_context(served(path, plugins))
        divided = load(path, plugins, one, spares=SpareList([spare]))
        with divided.create_session(n_ctx=100) as session:
            lost.close()
            with pytest.raises(StageError) as raised:
                session.eval(TOKENS)
        divided.program.renew()
        divided.close()
        with load(path, plugins, spare) as next_one, load_model(path, plugins=plugins) as whole:
            np.testing.assert_array_equal(logits(next_one), logits(whole))
        assert raised.tb is not None


@contextmanager
def serving(path: Path, *workers: tuple[str, int]) -> Iterator[LocalEngine]:
    """Engine on a worker and spare ones, once it is loaded."""
    limits = EngineSettings(threads=1, n_ctx=300, workers=Workers(workers[:1], SECRET, spares=workers[1:]))
    engine = LocalEngine([ModelSource("m", path)], limits)
    try:
        engine.load("m").result()
        assert engine.stats().status == "ok"
        yield engine
    finally:
        engine.close()


@pytest.mark.medium
def test_the_state_of_a_server_until_a_spare_worker_works(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced without a request."""
    path, goes_on, prepare = tiny_gguf("gqa"), threading.Event(), StagedEngine._prepare
    with ExitStack() as lost, served(path, plugins) as spare:
        one = lost.enter_context(served(path, plugins))
        with serving(path, one, spare) as engine:
            monkeypatch.setattr(StagedEngine, "_prepare", lambda *given: goes_on.wait(30) and prepare(*given))
            lost.close()
            status_is(engine, "stage_lost")
            threading.Event().wait(0.2)
            assert engine.stats().status == "stage_lost"
            goes_on.set()
            status_is(engine, "ok")
            asyncio.run(answers(engine, 1))


@pytest.mark.medium
def test_the_state_of_a_server_until_a_worker_is_started_again(
    tiny_gguf: TinyGguf, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamacli.serve.engine._RETRY", 0.1)
    path = tiny_gguf("gqa")
    with ExitStack() as lost:
        one = lost.enter_context(served(path, plugins))
        with serving(path, one) as engine:
            lost.close()
            while not engine.models()[0].failure:  # nor could it be loaded again
                threading.Event().wait(0.01)
            assert engine.stats().status == "stage_lost"
            with served(path, plugins, port=one[1]):
                status_is(engine, "ok")
                asyncio.run(answers(engine, 1))


@contextmanager
def worker_process(path: Path, secret: Path) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """Worker in a process of its own, and its address."""
    command = [sys.executable, "-m", "llamacli", "worker", str(path), "--listen", "127.0.0.1:0", "-t", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [*command, "--secret-file", str(secret)], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"listening on (\S+):(\d+)", process.stderr.readline())
            assert found is not None
            yield process, (found[1], int(found[2]))
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("mode", SplitMode)
@pytest.mark.parametrize("with_spare", [True, False])
def test_a_killed_worker_under_requests(
    with_spare: bool, mode: SplitMode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes: texts go on with a spare worker, or fail."""
    path, secret = demo_path(), tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    (expected,) = served_answers(path, None, nothing)
    with worker_process(path, secret) as (process, address), worker_process(path, secret) as (_, spare):
        workers = Workers((address,), SECRET, spares=(spare,) if with_spare else (), mode=mode)
        (found,) = served_answers(path, workers, process.kill)
    lost = [answer for answer in found if isinstance(answer, StageLostError)]
    assert all(answer in (expected[i], *lost) for i, answer in enumerate(found))
    assert f"worker 127.0.0.1:{address[1]} is lost" in caplog.text
    assert not lost if with_spare else lost and all(str(address[1]) in str(error) for error in lost)


@pytest.mark.parametrize(("split", "message"), [([1.0], "2 positive numbers"), ([1, 0], "2 positive numbers")])
def test_wrong_splits_are_refused(split: list[float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StagedEngine([("127.0.0.1", 1)], SECRET, split=split)


def test_more_nodes_than_layers_are_refused(tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    path = tiny_gguf("gqa", n_layer=2)
    with (
        served(path, plugins) as one,
        served(path, plugins) as two,
        pytest.raises(InvalidRequestError, match="2 stages at most, and there are 3 nodes"),
    ):
        load(path, plugins, one, two)


Misbehave = Callable[[Connection, int], None]


def garbage(connection: Connection, number: int) -> None:
    connection._socket.sendall(b"garbage" * 100)


def changed(connection: Connection, number: int) -> None:
    connection._key = b"of another session"
    connection.send("result", [np.zeros((1, 8), np.float32)], number=number)


def wrong_number(connection: Connection, number: int) -> None:
    connection.send("result", [np.zeros((1, 8), np.float32)], number=number + 1)


def wrong_shape(connection: Connection, number: int) -> None:
    connection.send("result", [np.zeros((1, 8), np.float32)], number=number)


def ended(connection: Connection, number: int) -> None:
    connection.close()


def another_part(connection: Connection, number: int) -> None:
    connection.send("part", [np.zeros((1, 8), np.float32)], number=number)


def failed(connection: Connection, number: int) -> None:
    messages.send_error(connection, number, ValueError("a reason"))


def silent(connection: Connection, number: int) -> None:
    """Send nothing."""


def slow(connection: Connection, number: int) -> None:
    for _ in range(30):
        connection.send("busy")
        threading.Event().wait(0.1)


WRONG = [
    (garbage, "too large"),
    (changed, "a frame was changed, or is not the next one"),
    (wrong_number, "batch 2, which was not asked"),
    (wrong_shape, "float32"),
    (ended, "the connection"),
    (silent, "it has sent nothing for"),
    (slow, "the result of batch 1 is missing after"),
]


WRONG_ROWS = [
    *(case for case in WRONG if case[0] not in (wrong_number, wrong_shape, slow)),
    (slow, "a part of batch 1 is missing after"),
    (wrong_number, "'result' of batch 2 instead of a part of 1"),
    (another_part, r"it sent float32 \(1, 8\) instead of float32 \(40, "),
    (failed, "ValueError: a reason"),
]


@contextmanager
def answering(model: Model, misbehave: Misbehave) -> Iterator[tuple[str, int]]:
    """Address of a worker that behaves until a batch comes."""

    def serve() -> None:
        sock, _ = listener.accept()
        connection = Connection.accept(sock, "caller", SECRET, 5)
        connection.receive()
        connection.send(
            "info", version=messages.version(), identity=model.identity, memory=1 << 40, speed=1_000_000_000
        )
        connection.receive()
        connection.send("loaded")
        frame = connection.receive()
        if frame.kind == "join":
            connection.send("joined")
            frame = connection.receive()
        try:
            misbehave(connection, frame.number("number"))
            done.wait(10)
        except StageError:
            pass  # the caller has ended it
        connection.close()

    done = threading.Event()
    with listen(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            done.set()
            thread.join()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mode", "misbehave", "message"),
    [(mode, *case) for mode, cases in ((SplitMode.LAYER, WRONG), (SplitMode.ROW, WRONG_ROWS)) for case in cases],
)
def test_workers_that_misbehave_give_typed_errors(
    mode: SplitMode, misbehave: Misbehave, message: str, tiny_gguf: TinyGguf, plugins: Plugins
) -> None:
    path = tiny_gguf("gqa")
    with (
        load_model(path, plugins=plugins) as whole,
        answering(whole, misbehave) as address,
        load(path, plugins, address, mode=mode, silence_s=1, batch_s=2) as model,
        model.create_session(n_ctx=100) as session,
    ):
        with pytest.raises(StageError, match=message):
            session.eval(TOKENS)
        assert session.n_past == 0
        if misbehave not in (wrong_shape, failed):
            with pytest.raises(StageError, match=r"worker 127\.0\.0\.1"):
                session.eval(TOKENS)
