"""Settings of a small shop. The environment says where the servers of a test are."""

import json
import os

import django

SECRET_KEY = "of this test"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
DATABASES = {"default": json.loads(os.environ["SITE_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "bullpen.integrations.django",
    "shop",
]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")  # what Django 6 has by itself
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
BULLPEN = {"OUTBOX": "default", "DASHBOARD_URL": "https://ops.example.com/bullpen/"} | json.loads(
    os.environ.get("SITE_BULLPEN", "{}")
)
TASKS = {
    "default": {
        "BACKEND": "bullpen.integrations.django.backend.BullpenBackend",
        "QUEUES": ["default", "reports"],
        "OPTIONS": {"outbox": bool(os.environ.get("SITE_TASKS_IN_OUTBOX", "yes"))},
    }
}
