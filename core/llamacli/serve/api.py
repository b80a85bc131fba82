"""Names for an API that another distribution adds to the server.

Its routes are an entry point of the group `llamacli.apis`: a sequence of `ApiRoute`.
"""

from llamacli.serve.errors import BadRequestError, ServeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.generation import Prepared, prepared
from llamacli.serve.http.replies import Choice, Reply, joined
from llamacli.serve.http.routes import ApiRoute
from llamacli.serve.http.schemas.chat import ChatMessage, ChatRequest
from llamacli.serve.http.schemas.completions import CompletionRequest
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema
from llamacli.serve.http.sse import event, line
from llamacli.serve.requests import Done, Event, Finished, TextDelta, Timings, ToolCallDelta, Usage

__all__ = [
    "ApiRoute",
    "BadRequestError",
    "Call",
    "ChatMessage",
    "ChatRequest",
    "Choice",
    "CompletionRequest",
    "Done",
    "Event",
    "Finished",
    "Foreign",
    "Prepared",
    "Refused",
    "Reply",
    "Schema",
    "ServeError",
    "TextDelta",
    "Timings",
    "ToolCallDelta",
    "Usage",
    "event",
    "joined",
    "line",
    "prepared",
]
