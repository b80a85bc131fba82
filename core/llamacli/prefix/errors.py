"""Exceptions that prefix sessions raise, beside those of `llamacli.errors`."""

from llamacli.errors import ClosedError, LlamaCliError


class SessionClosedError(ClosedError):
    """A prefix session was used after close()."""


class SessionUnavailableError(LlamaCliError):
    """No session factory or embedding function is registered."""


class SessionFatalError(LlamaCliError):
    """The engine failed and the session is unusable; `cause` says why."""

    def __init__(self, cause: Exception):
        self.cause = cause
        super().__init__(f"the session is unusable since {type(cause).__name__}: {cause}")


class ManifestMismatchError(LlamaCliError):
    """A context differs from its manifest. `reason` names the difference."""

    PREFIX = "manifest mismatch: "

    def __init__(self, reason: str):
        while reason.startswith(self.PREFIX):
            reason = reason.removeprefix(self.PREFIX)
        self.reason = reason
        super().__init__(self.PREFIX + reason)


class UnsupportedFeatureError(LlamaCliError):
    """The configuration needs a feature that is not supported. `feature` names it."""

    def __init__(self, feature: str = ""):
        self.feature = feature
        super().__init__(f"unsupported feature{feature and f': {feature}'}")


class CancelledError(LlamaCliError):
    """The caller cancelled the call; its new tokens were discarded."""
