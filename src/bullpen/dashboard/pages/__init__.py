"""The pages, one module per subject. Each route reads a view and names the template that draws it."""

from __future__ import annotations

from bullpen.dashboard.pages import (
    acting,
    adding,
    audit,
    chains,
    charts,
    destinations,
    entry,
    flow,
    health,
    jobs,
    ledger,
    letters,
    live,
    messages,
    operations,
    overview,
    retrying,
    schedules,
    search,
    tail,
    workers,
    workflows,
)

ROUTES = (
    *overview.ROUTES,
    *jobs.ROUTES,
    *adding.ROUTES,
    *flow.ROUTES,
    *retrying.ROUTES,
    *acting.ROUTES,
    *letters.ROUTES,
    *ledger.ROUTES,
    *chains.ROUTES,
    *destinations.ROUTES,
    *workflows.ROUTES,
    *messages.ROUTES,
    *schedules.ROUTES,
    *workers.ROUTES,
    *charts.ROUTES,
    *tail.ROUTES,
    *operations.ROUTES,
    *health.ROUTES,
    *audit.ROUTES,
    *search.ROUTES,
    *live.ROUTES,
    *entry.ROUTES,
)
"""All addresses, in the order of the menu. The first that fits wins."""
