"""What the admin shows: no tables of Django's."""

from __future__ import annotations

from django.db import models


class JobQueue(models.Model):
    """A queue on the server, for the list in the admin."""

    name = models.CharField(max_length=200, primary_key=True)

    class Meta:
        managed = False
        app_label = "bullpen"
        default_permissions = ("view",)
        verbose_name = "queue"

    def __str__(self) -> str:
        return str(self.name)
