"""Typed views that pages, the JSON API and programs share. Names on the wire are in camel case."""
