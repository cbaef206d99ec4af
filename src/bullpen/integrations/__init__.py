"""bullpen inside of web frameworks: `fastapi`, `starlette`, `django`. Each imports its framework; nothing else does."""
