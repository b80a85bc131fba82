"""`python -m llamacli` is the command line."""

from llamacli.cli import main

main()
