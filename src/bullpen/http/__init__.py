"""ASGI applications: they mount in any framework, and `bullpen run --http` serves them."""
