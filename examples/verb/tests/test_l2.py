"""Checks of L2Llama: files, invalid files, results."""

from llamacli.testing import check_op, parametrize_with_checks
from llamacli_l2 import L2Llama, SlowL2Norm
from llamacli_l2.l2_norm import L2Norm
from llamacli_l2.tiny import VARIANTS


@parametrize_with_checks([L2Llama()], VARIANTS)
def test_architecture(check):
    check()


def test_kernels_agree_with_the_reference():
    for op in (L2Norm, SlowL2Norm):
        check_op(op)
