"""Tool calls and reasoning of Granite 3; Granite 4 has Hermes's."""

from llamacli.plugin import THINK, Calls, ChatFormat, Spans, TemplateInfo, json_calls


def _is_granite_3(info: TemplateInfo) -> bool:
    architecture = info.metadata.get_str("general.architecture", "")
    return architecture in ("granite", "granitemoe", "granitehybrid") and info.mentions("<|tool_call|>")


FORMAT = ChatFormat(
    name="granite-3",
    matches=_is_granite_3,
    syntax=Spans(THINK, Calls("<|tool_call|>", "", json_calls), dropped=("<response>", "</response>")),
)
