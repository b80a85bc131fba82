"""Entry point of `python -m llamacli`."""

from llamacli.cli import main

main()
