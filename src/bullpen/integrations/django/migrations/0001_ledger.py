"""The admin's page of queues, and the tables of the outbox."""

from __future__ import annotations

from django.db import migrations, models

from bullpen.integrations.django.migrations._ledger import LedgerTables


class Migration(migrations.Migration):
    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.CreateModel(
            name="JobQueue",
            fields=[("name", models.CharField(max_length=200, primary_key=True, serialize=False))],
            options={"managed": False, "default_permissions": ("view",), "verbose_name": "queue"},
        ),
        LedgerTables("0015"),
    ]
