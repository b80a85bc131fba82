"""Code blocks of docs/plugins.md.

The op to copy is the one that tests use; the elementwise one and the media encoder pass their checks.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from llamacli.testing.parametrize import checks_of
from llamacli_l2.l2_norm import L2Norm

GUIDE = (Path(__file__).resolve().parents[1] / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def block(text: str) -> str:
    (found,) = (block for block in BLOCKS if text in block)
    return found


def test_the_verb_to_copy_is_tested() -> None:
    assert block("class L2Norm") == Path(inspect.getfile(L2Norm)).read_text()


def test_the_encoder_passes_its_checks() -> None:
    namespace: dict[str, Any] = {"__name__": "llamacli_guide"}
    exec(block("class Plain"), namespace)
    names = []
    for check in checks_of(namespace["Plain"](), namespace["MEDIA"], inert=namespace["INERT"]):
        if check.name != "memory" and check.models():  # the class is in no module that a process could import
            check()
            names.append(check.name)
    assert {"tables", "layouts", "parameters", "mode_fp32"} <= set(names)


def test_the_elementwise_verb_passes_its_check() -> None:
    namespace = {"__name__": "llamacli_guide"}
    exec(block("class HardSigmoid") + block("check_op(HardSigmoid)"), namespace)
