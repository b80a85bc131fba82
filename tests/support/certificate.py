"""Self-signed certificate of localhost with its key, for tests of TLS."""

from pathlib import Path

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUZMc/O69M96UJb+0jCcUcY7vTuRUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzIxMDU0M1oYDzIxMjYxMDMw
MjEwNTQzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASky5lKzo2Q14Y6UnfQL2UE7V+NXcQ22x43ri/ZfvbL4DaPzvH7UToc
7jIjUVDMzdRFaY+AZ7T00BYpF+IYlW0oo28wbTAdBgNVHQ4EFgQUanQDv4fJ6zBy
hXozciOQfabUoGkwHwYDVR0jBBgwFoAUanQDv4fJ6zByhXozciOQfabUoGkwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAINxHkac6U15Rsx1zbLwCbvdJfnfkglMvC6U+f0dBozEAiB4
AfQzkh6hX56CyOsjY1JyNNjYMxKS7AQ7m57Wj5LNsA==
-----END CERTIFICATE-----
"""

KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQguIYs/0qJH5YbMex+
Um1hLykiu7dtaRYLADnIUCLB0V6hRANCAASky5lKzo2Q14Y6UnfQL2UE7V+NXcQ2
2x43ri/ZfvbL4DaPzvH7UToc7jIjUVDMzdRFaY+AZ7T00BYpF+IYlW0o
-----END PRIVATE KEY-----
"""


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write both into files; their paths."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(KEY)
    return certificate, key
