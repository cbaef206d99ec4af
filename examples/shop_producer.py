"""Adds jobs for the application in shop.py, as a web application would, and waits for their results."""

import asyncio

from shop import app, emails, invoices

from bullpen import JobFailed


async def main() -> None:
    async with app:
        mail = await emails.add("welcome", {"to": "ada@example.com"})
        paid = await invoices.add("print", {"number": 1, "amount": 120}, job_id="invoice-1", replace_finished=True)
        empty = await invoices.add("print", {"number": 2, "amount": 0})
        print(await mail.result(timeout=20_000))
        print(await paid.result(timeout=20_000))
        try:
            await empty.result(timeout=20_000)
        except JobFailed as error:
            print("dead letter:", error.reason)


if __name__ == "__main__":
    asyncio.run(main())
