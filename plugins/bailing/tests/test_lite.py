"""Checks of Ling-lite and GroveMoE.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import pytest

from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from tiny_lite import MODELS, VARIANTS


@parametrize_with_checks(MODELS, VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()
