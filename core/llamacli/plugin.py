"""Names that a plugin may import, under `LLAMACLI_API`.

Whatever else a plugin imports of llamacli may change at any time; its tests import `llamacli.testing` as well. Names
are imported at their first use; those of kernels need Numba only where a kernel is compiled. docs/plugin-names.md lists
all of them.
"""

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)
