"""The web dashboard: pages, their JSON and live updates over `bullpen.ops`, as one ASGI application.

    from bullpen.dashboard import make_dashboard

    application = make_dashboard(app)

Needs the extra `dashboard`. `bullpen dashboard` serves it without a program.
"""

from __future__ import annotations

from bullpen.dashboard.access import Permission, Role, Visitor
from bullpen.dashboard.app import Dashboard, make_dashboard

__all__ = ["Dashboard", "Permission", "Role", "Visitor", "make_dashboard"]
