"""Suites that every implementation of a port passes. Subclass one and give it what it asks for."""
