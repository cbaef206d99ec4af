"""The application that a project installs."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class BullpenConfig(AppConfig):
    """Imports the modules `tasks` of all applications, so that their tasks are known to whoever adds or runs them."""

    name = "bullpen.integrations.django"
    label = "bullpen"
    verbose_name = "bullpen"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from bullpen.integrations.django import _app  # noqa: F401  # mistakes of the settings are told at the start
        from bullpen.integrations.django.backend import register_backends

        autodiscover_modules("tasks")
        register_backends()
