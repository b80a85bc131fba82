"""GLM family: ChatGLM3, GLM-4, GLM-4.5 to 4.7."""

from llamacli.plugin import hookimpl
from llamacli_glm.dense import ChatGlm, Glm4
from llamacli_glm.mixture import Glm4Moe

LLAMACLI_API = 1


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (ChatGlm, Glm4, Glm4Moe):
        register(architecture())
