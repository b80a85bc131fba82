"""Errors of the server, sent between processes."""

from __future__ import annotations

import pickle

from llamacli.serve.errors import PromptTooLongError, QueueFullError
from llamacli.serve.http.errors import BadRequestError


def test_errors_are_pickled_with_all_that_a_client_sees() -> None:
    for error in (
        PromptTooLongError(20, 10),
        QueueFullError("full", retry_after=7),
        BadRequestError("bad", "messages[0]", "invalid_schema"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)
        assert (copy.status, copy.code, copy.param) == (error.status, error.code, error.param)
