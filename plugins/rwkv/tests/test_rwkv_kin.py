"""Checks of RWKV-6, QRWKV-6 and ARWKV-7.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import pytest

from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from tiny_rwkv_kin import MODELS, VARIANTS


@parametrize_with_checks(MODELS, VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()
