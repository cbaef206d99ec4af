"""The app after Django has been set up, for `bullpen run bullpen.integrations.django.worker:app`.

`manage.py bullpen_worker` runs it, also in several processes and in child processes, which begin with this module.
"""

from __future__ import annotations

import django

django.setup()

from bullpen.integrations.django import app  # noqa: E402

__all__ = ["app"]
