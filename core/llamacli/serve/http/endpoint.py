"""ASGI apps of routes: keys, bodies, handlers, errors as responses."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from llamacli.serve.http.call import Call, DisconnectedError
from llamacli.serve.http.errors import as_serve_error
from llamacli.serve.http.resumable import resumable
from llamacli.serve.http.routes import ApiRoute, loaded
from llamacli.serve.http.state import Server


class Endpoint:
    """ASGI app of a route.

    Checks the key, unless it is `public`, gives the handler the body as its second argument is annotated, and turns
    exceptions into responses. One that is `queued` refuses requests before their body is read while the engine has no
    room for any.
    """

    def __init__(self, route: ApiRoute, server: Server):
        self._route, self._server = route, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        route = self._route
        if route.error_body is not None:
            scope["state"]["error_body"] = route.error_body
        call = Call(self._server, scope, receive, send)
        try:
            if not route.public:
                call.check_key()
            handler, kind = loaded(route.handler)
            limited = route.queued and "exchange" not in scope["state"]  # those of a batch have begun already
            with self._server.keys.admitted(call.api_key if limited else None):
                if route.queued and not call.background:
                    self._server.engine.expect_room()
                if kind is None:
                    await handler(call)
                else:
                    request = await call.body(kind)
                    with resumable(call, request):
                        await handler(call, request)
        except DisconnectedError:
            return
        except Exception as error:
            failure = as_serve_error(error, call.request_id)
            call.access.fields["error"] = failure.code or failure.type
            if not call.started:
                await call.discard_body()
                await call.fail(failure)
        finally:
            call.close()
            fields = call.access.fields
            self._server.metrics.count(route.name, call.access.status, fields.get("finish", ""), fields.get("key"))
