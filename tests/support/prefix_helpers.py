"""Texts, configuration and cancellation of the prefix session tests."""

from llamacli.prefix import PrefixConfig

PREFIX, OTHER, SUFFIX = "once upon a time", "once upon me", " there once"
CONFIG = PrefixConfig(n_ctx=128, n_batch=4)


class CancelAfter:
    """Cancellation flag that is set after n checks."""

    def __init__(self, n: int):
        self.n = n

    def is_set(self) -> bool:
        self.n -= 1
        return self.n < 0
