"""Resident memory after large texts, schemas and adapters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import write_adapter
from llamacli.hub.demo import demo_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc"),
]

BEGIN = """
import json, resource, sys
from llamacli import load_model
from llamacli.hub.demo import demo_path

def resident():
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize() >> 20

sizes = []
"""
ADAPTERS = """
for _ in range(2):
    with load_model(str(demo_path()), threads=1) as model:
        sizes.append(resident())
        many = [model.load_adapter(sys.argv[1]) for _ in range(10)]
        for adapter in many:
            with model.create_session(adapters=[(adapter, 1.0)]) as session:
                session.eval([1, 2, 3])
        sizes.append(resident())
        del many, adapter, session
    sizes.append(resident())
print(json.dumps(sizes))
"""
SCHEMAS = """
from llamacli.sampling import SamplingParams
from llamacli.serve.http.constraints import chain
with load_model(str(demo_path()), threads=1) as model:
    for i in range(64):
        keys = {f"k{i}_{j}": {"type": "string", "maxLength": j % 50} for j in range(1000)}
        chain(model, SamplingParams(json_schema=json.dumps({"type": "object", "properties": keys})))
        sizes.append(resident())
print(json.dumps(sizes))
"""
TEXTS = """
with load_model(str(demo_path()), threads=1) as model:
    for i in range(16):
        model.tokenizer.encode(f"once upon a time {i} " * 100_000)
        sizes.append(resident())
print(json.dumps(sizes))
"""


def resident(program: str, *arguments: str) -> list[int]:
    """MiB of resident memory, without pages of files, that a program prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BEGIN + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    sizes: list[int] = json.loads(done.stdout)
    return sizes


def test_adapters_go_with_their_model(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "adapter.gguf", demo_path(), rank=512)
    _, used, closed, _, used_again, closed_again = resident(ADAPTERS, str(file))
    assert used - closed > 5 * (file.stat().st_size >> 20)
    assert closed_again - closed < 32
    assert used_again - used < 128


def test_kept_schemas_have_a_limit() -> None:
    sizes = resident(SCHEMAS)
    assert sizes[39] - sizes[0] > 64  # some are kept
    assert sizes[63] - sizes[39] < 64


def test_large_texts_leave_nothing() -> None:
    sizes = resident(TEXTS)
    assert sizes[15] - sizes[3] < 48
