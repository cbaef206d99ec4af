"""Queues in Django's admin: how full they are, with links to the dashboard, where things are done."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse

from bullpen.errors import BullpenError
from bullpen.integrations.django._app import app
from bullpen.integrations.django._options import options
from bullpen.integrations.django.models import JobQueue


@admin.register(JobQueue)
class JobQueueAdmin(admin.ModelAdmin):
    """One page, for staff who may view queues."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> TemplateResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        problem, queues = None, []
        try:
            queues = [_row(name) for name in sorted({*app.tasks, *(worker.queue_name for worker in app.workers)})]
        except BullpenError as error:
            problem = str(error)
        context = {
            **self.admin_site.each_context(request),
            "title": "Queues",
            "queues": queues,
            "problem": problem,
            "dashboard_url": options().dashboard_url,
            "opts": self.model._meta,
        }
        return TemplateResponse(request, "admin/bullpen/queues.html", context)


def _row(name: str) -> dict[str, Any]:
    from bullpen.sync import Queue

    with Queue(name, connection=app.connection, prefix=app.prefix) as queue:
        counts = queue.counts()
    base = options().dashboard_url
    return {
        "name": name,
        "counts": counts,
        "url": f"{base.rstrip('/')}/queues/{quote(name, safe='')}" if base else None,
    }
