"""Schemas of requests, as msgspec structs.

They check bodies and make the OpenAPI page.
All fields without a default are required; `null` counts as absent. Unknown fields are ignored.
"""
