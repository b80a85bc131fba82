"""Checks of Kimi Linear, Kimi K3, Ling 3 and Mistral Small 4.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import pytest

from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from tiny_kda import INERT, MODELS, VARIANTS


@parametrize_with_checks(MODELS, VARIANTS, slow=pytest.mark.slow, inert=INERT)
def test_architecture(check: Check) -> None:
    check()
