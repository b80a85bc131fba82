"""Prefix caching: sessions that keep a prompt's prefix evaluated while suffixes change.

- `session`: PrefixSession, its configuration and reports.
- `manifest`: segments and hashes that identify a context.
- `registry`: replaceable session factory and embedding function.
- `errors`: exceptions of these.
"""

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)
