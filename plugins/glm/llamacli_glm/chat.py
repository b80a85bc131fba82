"""Tool calls of GLM-4.5 to 4.7."""

from llamacli.plugin import THINK, Calls, ChatFormat, Spans, TemplateInfo, tagged_calls

_CALLS = Calls(
    "<tool_call>",
    "</tool_call>",
    tagged_calls(
        r"(?P<name>[^\s<>]+)\s*(?P<arguments>(?:<arg_key>.*</arg_value>)?)",
        r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def _is_glm(info: TemplateInfo) -> bool:
    architecture = info.metadata.get_str("general.architecture", "")
    return architecture in ("glm4", "glm4moe") and info.mentions("<tool_call>", "<arg_key>")


FORMAT = ChatFormat(name="glm-4.5", matches=_is_glm, syntax=Spans(THINK, _CALLS))
