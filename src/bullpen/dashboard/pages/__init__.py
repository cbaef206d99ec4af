"""The pages, one module per subject. Each route reads a view and names the template that draws it."""

from __future__ import annotations

from bullpen.dashboard.pages import acting, entry, health, jobs, ledger, letters, live, overview, schedules, workers

ROUTES = (
    *overview.ROUTES,
    *jobs.ROUTES,
    *acting.ROUTES,
    *letters.ROUTES,
    *workers.ROUTES,
    *schedules.ROUTES,
    *health.ROUTES,
    *ledger.ROUTES,
    *live.ROUTES,
    *entry.ROUTES,
)
"""All addresses. The first that fits wins."""
