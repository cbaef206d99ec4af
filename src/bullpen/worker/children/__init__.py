"""Handlers in child processes, which can be killed."""
