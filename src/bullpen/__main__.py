"""`python -m bullpen`, for where the command itself is not on the path."""

from bullpen.cli import main

main()
