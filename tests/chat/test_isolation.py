"""Helper processes for templates: limits, interrupts, threads, forks."""

import _thread
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamacli import ChatTemplateError, InvalidRequestError
from llamacli.chat import environment, isolation
from llamacli.chat.template import ChatTemplate
from llamacli.testing.chats import CHATML
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

pytestmark = pytest.mark.medium

TOKENIZER = tokenizer_from_metadata(byte_level([], {"<s>": CONTROL}))
USER = {"role": "user", "content": "x" * 100}
SHARED = (
    "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
)
TUPLES = "{% set a.x = (1,) %}{% for i in range(60) %}{% set a.x = (a.x, a.x) %}{% endfor %}"
SLOW = [
    "{{ a.x == b.x }}", "{{ a.x < b.x }}", "{{ a.x in [b.x] }}", "{{ [a.x, b.x] | sort }}", "{{ [a.x, b.x] | min }}",
    "{{ a.x }}", "{{ a.x | string }}", "{{ a.x | tojson }}", "{{ a.x | pprint }}", "{{ '%s' % a.x }}", "{{ a.x ~ 1 }}",
    "{{ '{}'.format(a.x) }}", "{{ a.x | join }}", "{{ a.x | upper }}", "{{ a.x | trim }}", "{{ a.x | int }}",
    "{{ a.x | replace('a', 'b') }}", "{{ raise_exception(a.x) }}", "{{ ([[0] * 10000] * 10000) | sum(start=[]) }}",
    "{{ range(99999) | map('string') | select('in', range(99999) | list) | list | length }}",
    "{{ ([range(100000) | list] * 100000) | map('sum') | list | length }}",
    "{{ ([range(100000) | list] * 100000) | map('max') | list | length }}",
    "{{ ('a' * 1000000) | wordwrap(1, wrapstring='b' * 100000) }}", TUPLES + "{{ [a.x] | unique | list }}",
    TUPLES + "{{ {a.x: 1} }}", "{{ ([range(100000) | list] * 100000) | map('sort') | list | length }}",
    "{{ ([range(100000) | list] * 100000) | map('tojson') | list | length }}",
]  # fmt: skip
LARGE = [
    "{{ ([range(100000) | list] * 100000) | map('list') | list | length }}",
    "{{ ([range(100000)] * 1000) | map('list') | list | length }}",
    "{{ ([range(100000) | list] * 100000) | map('reverse') | map('list') | list | length }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ 'a'.encode() * 10 ** 10 }}",
    "{{ 'a'.encode().center(10 ** 10) }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{{ '%1000000000d'.encode() % 1 }}",
    "{{ ('a' * 100000).encode().replace('a'.encode(), ('b' * 100000).encode()) | length }}",
]


@pytest.fixture(autouse=True)
def only_these_helpers() -> Iterator[None]:
    isolation._pool.end()
    yield
    isolation._pool.end()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_SECONDS", 0.2)


def render(source: str, **given: Any) -> str:
    return ChatTemplate(source, TOKENIZER).render([USER], **given).text


def helpers() -> list[int]:
    """Process ids of the idle helpers."""
    return [helper.process.pid for helper in isolation._pool._idle]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", [SLOW[0], SLOW[5], SLOW[18], SLOW[20]])
def test_time_in_c_code_is_limited(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"cannot be rendered: it takes more than (0\.2 s$|10 s on)"):
        render(SHARED + source)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", SLOW)
def test_time_of_every_operation_is_limited(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"it takes more than"):
        render(SHARED + source)


@pytest.mark.parametrize("source", LARGE)
def test_memory_is_limited(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="it takes more than 256 MiB of memory"):
        render(source)


def test_text_is_limited_beside_that_of_the_conversation() -> None:
    with pytest.raises(ChatTemplateError, match="it makes more than 4 MiB of text"):
        render("{{ 'x' * 4200000 }}")
    assert len(render("{{ 'x' * 4194304 }}")) == 1 << 22
    text = "x" * 5_000_000
    template = ChatTemplate("{{ messages[0].content }}", TOKENIZER)
    assert template.render([{"role": "user", "content": text}]).text == text


def test_helpers_are_kept_and_replaced() -> None:
    assert render("a") == "a"
    (first,) = helpers()
    assert render("b") == "b"
    assert helpers() == [first]
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert render("c") == "c"
    assert helpers() != [first]


def test_helper_that_keeps_much_memory_is_replaced() -> None:
    circle = "{% set a = namespace() %}{% set a.x = a %}{% set a.y = 'x' * 60000000 %}{{ messages | length }}"
    ended = False
    for _ in range(5):
        assert render(circle) == "1"
        ended = ended or not helpers()
    assert ended


@pytest.mark.usefixtures("short")
def test_rendering_goes_on_after_a_limit_and_leaves_no_zombie() -> None:
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="more than"):
            render(SHARED + SLOW[0])
        assert helpers() == []
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert render("a") == "a"
        isolation._pool.end()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT, which programs that a shell starts in background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_a_rendering_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a helper deep in C code, with its limits far away."""
    assert render("a") == "a"
    (helper,) = map(psutil.Process, helpers())
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    monkeypatch.setattr(environment, "MAX_SECONDS", 600.0)
    monkeypatch.setattr(isolation, "MAX_WAIT", 600.0)
    template, sent = ChatTemplate(SHARED + SLOW[0], TOKENIZER), list[float]()

    def interrupt() -> None:
        idle = sum(helper.cpu_times()[:2])
        while sum(helper.cpu_times()[:2]) < idle + 0.2:
            time.sleep(0.01)
        sent.append(sum(helper.cpu_times()[:2]))
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        template.render([USER])
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before - sent[0] < 20  # s of CPU; usually far less
    assert not helper.is_running()
    assert helpers() == []
    assert render("a") == "a"


def test_clock_is_limited_for_a_helper_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    render("a")
    (helper,) = helpers()
    os.kill(helper, signal.SIGSTOP)
    monkeypatch.setattr(isolation, "MAX_WAIT", 0.2)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.2 s on the clock"):
        render("b")
    assert helpers() == []


def test_several_threads() -> None:
    template, found = ChatTemplate(CHATML, TOKENIZER), set[str]()
    messages = [{"role": "user", "content": "<s>"}]

    def run() -> None:
        found.update(template.render(messages).text for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"<|im_start|>user\n<s><|im_end|>\n"}
    assert len(helpers()) <= 2


def _render_in_child(queue: Any) -> None:
    before = helpers()
    queue.put((before, render("b"), len(helpers())))


def test_fork_gets_helpers_of_its_own() -> None:
    render("a")
    (helper,) = helpers()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_render_in_child, args=(queue,))
    child.start()
    assert queue.get() == ([], "b", 1)
    child.join()
    assert child.exitcode == 0
    assert (render("c"), helpers()) == ("c", [helper])


SCRIPT = """
from test_isolation import helpers, render
render("a")
print(*helpers(), flush=True)
input()
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("killed", [True, False])
def test_helpers_end_with_their_parent(killed: bool) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{SCRIPT}"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper = Path("/proc") / parent.stdout.readline().strip()
    assert (helper / "cmdline").read_text()
    if killed:
        parent.kill()
        parent.wait()
    else:
        parent.communicate("\n")
        assert parent.returncode == 0
    for _ in range(500):
        if not helper.is_dir() or (helper / "stat").read_text().split()[2] == "Z":  # of no reaping init
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the helper outlives its parent")
    for pipe in (parent.stdin, parent.stdout):
        pipe.close()


def test_data_arrives_unchanged() -> None:
    values = {
        "nan": float("nan"),
        "large": 10**30,
        "lone": "\ud800",
        "text": "日本 \U0001f98a\n\x00",
        "nested": [{"a": None}],
    }
    text = render("{{ v | tojson }}{{ v.lone }}{{ v.large + 1 }}", v=values)
    assert text == json.dumps(values, ensure_ascii=False) + "\ud800" + str(10**30 + 1)


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}])
def test_values_that_are_not_json_raise(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be JSON data"):
        render("a", v=value)


def test_without_helpers_templates_are_rendered_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(isolation, "_pool", isolation._Pool())
    monkeypatch.setattr(environment, "MAX_SECONDS", 0.2)
    assert (render("a"), render("b"), helpers()) == ("a", "b", [])
    with pytest.raises(ChatTemplateError, match=r"line 1: it takes more than 0\.2 s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert [record.message for record in caplog.records] == [
        "no helper process can be started: chat templates run without limits of memory"
    ]


def test_helpers_import_no_heavy_package() -> None:
    code = "import sys, llamacli.chat.worker; print({'numpy', 'numba', 'attrs', 'gguf'} & sys.modules.keys())"
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
