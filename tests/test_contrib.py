"""Files of contrib/: a systemd unit and a Containerfile."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from llamacli.cli.app import app

CONTRIB = Path(__file__).parents[1] / "contrib"
VARIABLE = re.compile(r"LLAMACLI_SERVE_(\w+)")


def test_systemd_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (CONTRIB / "llamacli.service").read_text()
    assert "ExecStart=/opt/llamacli/bin/llamacli serve " in text
    unit = tmp_path / "llamacli.service"
    unit.write_text(text.replace("/opt/llamacli/bin/llamacli", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "llamacli.service" not in done.stderr, done.stderr


def test_unit_allows_compiled_kernels() -> None:
    assert "MemoryDenyWriteExecute" not in (CONTRIB / "llamacli.service").read_text()


@pytest.mark.parametrize("name", ["llamacli.service", "Containerfile"])
def test_variables_are_those_of_options(name: str) -> None:
    used = set(VARIABLE.findall((CONTRIB / name).read_text()))
    command = app.commands["serve"]
    assert used
    assert used <= {str(param.name).upper() for param in command.params if isinstance(param, click.Option)}


def test_containerfile_has_known_instructions() -> None:
    text = re.sub(r"\\\n", " ", (CONTRIB / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.split()[0] for line in lines]
    assert set(names) <= {"FROM", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    assert (names[0], lines[-1]) == ("FROM", 'ENTRYPOINT ["llamacli", "serve"]')
    assert names.index("USER") < names.index("ENTRYPOINT")
