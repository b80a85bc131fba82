from llamacli import ClosedError, LlamaCliError
from llamacli.prefix import ManifestMismatchError, UnsupportedFeatureError, errors


def test_messages_and_attributes() -> None:
    nested = ManifestMismatchError(str(ManifestMismatchError("because")))
    assert (str(nested), nested.reason) == ("manifest mismatch: because", "because")
    assert (str(UnsupportedFeatureError()), UnsupportedFeatureError("tools").feature) == (
        "unsupported feature", "tools",
    )  # fmt: skip


def test_all_are_llamacli_errors() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) >= 6
    assert all(issubclass(error, LlamaCliError) for error in classes)
    assert issubclass(errors.SessionClosedError, ClosedError)
