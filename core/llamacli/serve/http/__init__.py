"""HTTP layer of the server: Starlette app, schemas, endpoints."""
