"""An application: `bullpen run shop:app --processes 2` runs its handlers, `python shop_producer.py` adds jobs."""

import asyncio

from bullpen import Bullpen, Job, PermanentError

app = Bullpen()
emails = app.queue("emails", attempts=5, remove_on_complete=1_000)
invoices = app.queue("invoices", remove_on_complete=1_000)


@app.handler("emails", concurrency=50)
async def send_email(job: Job) -> dict[str, str]:
    await asyncio.sleep(0.01)  # the mail server
    return {"sent to": job.data["to"]}


@app.handler("invoices", concurrency=4, dead_letters=True)
def print_invoice(job: Job) -> str:
    """A plain function: runs in a thread, so it may block."""
    if job.data["amount"] <= 0:
        raise PermanentError("nothing to pay")
    job.sync.progress(50)
    return f"invoice {job.data['number']} over {job.data['amount']}"
