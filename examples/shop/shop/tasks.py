"""The shop's tasks. `chasqui worker shop.tasks:app` runs them."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from chasqui import App, UnrecoverableError
from shop.bank import Bank, CardRefused
from shop.orders import Order, Payment

log = logging.getLogger(__name__)


@asynccontextmanager
async def lifespan() -> AsyncIterator[Bank]:
    """Once in each worker, around all of its jobs. A real client would be opened and closed."""
    yield Bank()


app = App("shop", lifespan=lifespan)


@app.task(attempts=5, backoff=timedelta(seconds=2), timeout=timedelta(seconds=10))
async def charge(order: Order) -> Payment:
    """Charge the customer, then have the invoice written. It runs on the event loop. If the bank
    cannot be reached, that raises, and the job is retried."""
    try:
        number = await app.context.charge(order.id, order.customer, order.total)
    except CardRefused as error:
        raise UnrecoverableError(str(error)) from error  # no retry helps
    payment = Payment(number, order.total)
    # With an id of its own it is added once, even if this runs twice.
    await invoice.with_options(job_id=f"invoice-{order.id}").enqueue(order, payment)
    log.info("charged %s", payment.amount)
    return payment


@app.task
def invoice(order: Order, payment: Payment) -> str:
    """The text of the invoice. A plain function runs in a thread, so it may take its time."""
    lines = [f"{line.count} x {line.item}: {line.price * line.count}" for line in order.lines]
    return "\n".join([*lines, f"paid: {payment.amount} ({payment.number})"])


@app.task(every=timedelta(hours=1))
async def report() -> str:
    """One worker runs it each hour, however many there are."""
    payments = app.context.payments.values()
    return f"{len(payments)} orders, {sum(payments)} in all"
