"""Names that a plugin may import, under `LLAMACLI_API`.

Whatever else a plugin imports of llamacli may change at any time; its tests import `llamacli.testing` as well. Names
are imported at their first use; those of kernels need Numba only where a kernel is compiled. docs/plugin-names.md lists
all of them.
"""

from typing import Any

from llamacli.util.exports import exports
from llamacli.util.settings import KERNEL_API_CHANGE

_MODULE_OF, _export, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "stride":  # a name of LLAMACLI_KERNEL_API 1
        raise ImportError(f"{__name__}.stride is gone: {KERNEL_API_CHANGE}, and derives strides", name=__name__)
    return _export(name)
