"""Copied into a project and run there; not a part of our own tests."""

collect_ignore_glob = ["*"]
