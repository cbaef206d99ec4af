"""The endpoints of an application: its ledger, its codec, and webhooks as the settings allow them.

In: settings. Out: `Endpoints`. The client of webhooks is loaded when the first address is checked or called. Elsewhere:
what endpoints are (`bullpen.outbox.endpoints`), the webhook (`bullpen.plugins.channels.webhook`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from bullpen.outbox.endpoint_channel import MakeWebhook
from bullpen.outbox.endpoints import EndpointOptions, Endpoints
from bullpen.ports.channel import Channel
from bullpen.queue.codec import Codec
from bullpen.settings import Settings

__all__ = ["make_endpoints"]


def make_endpoints(settings: Settings, ledger: Ledger, codec: Codec | None) -> Endpoints:
    """The configured endpoints. Nothing is opened yet."""
    chosen = settings.endpoints
    options = EndpointOptions(
        off_after_ms=chosen.off_after_ms or None,
        off_failures=chosen.off_failures,
        overlap_ms=chosen.overlap_ms,
        most_per_tenant=chosen.most_per_tenant,
        concurrency=chosen.concurrency,
    )
    return Endpoints(ledger, _webhooks(settings), codec=codec, options=options)


def _webhooks(settings: Settings) -> MakeWebhook:
    chosen = settings.endpoints

    def make(url: str, *, secrets: Sequence[str], headers: Mapping[str, str]) -> Channel:
        from bullpen.plugins.channels.webhook import Webhook

        webhook = Webhook(
            url,
            secret=secrets,
            headers=headers,
            timeout_ms=settings.webhooks.timeout_ms,
            allow_http=chosen.allow_http,
            allowed_networks=chosen.networks,
        )
        # A name is looked at when it is called; an address can be refused while its owner is there to read why.
        if (expected := webhook.why_not(url)) is not None:
            raise InvalidOption("url", expected, urlsplit(url).hostname)
        return webhook

    return make
