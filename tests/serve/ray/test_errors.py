"""Errors of clusters."""

from llamacli.serve.ray.errors import reason_of


def test_reasons_are_the_last_exception() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\\n\\x1b[36mray::Replica.init()\\x1b[39m (pid=1)\\n"
        "  File \"a.py\", line 1\\n    raise KeyError: x\\nKeyError: 'a'\\n\\nDuring handling:\\n"
        "llamacli.errors.InvalidRequestError: a context takes 9 bytes: give fewer tokens\\n"
    )
    assert reason_of(message) == "a context takes 9 bytes: give fewer tokens (InvalidRequestError)"
    assert reason_of(message.replace("\\n", "\n")) == reason_of(message)


def test_other_messages_are_their_first_line() -> None:
    assert reason_of("A replica's health check failed.\nMore.") == "A replica's health check failed."
    assert reason_of("") == ""
