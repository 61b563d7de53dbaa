"""`python -m penstock`, for where the `penstock` command is not on the path."""

from penstock.cli.main import main

main()
