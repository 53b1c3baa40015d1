"""Tests of the shop's tasks: on a real server, which the fixture `jobs` brings along."""

from decimal import Decimal
from uuid import UUID

import pytest

from chasqui import UnrecoverableError
from chasqui.testing import Jobs
from shop.bank import Bank
from shop.orders import Line, Order, Payment
from shop.tasks import app, charge, invoice, report

ORDER = Order("ann@example.com", [Line("tea", Decimal("4.50"), 2)])
PAID = Payment(f"payment-{ORDER.id}", Decimal("9.00"))


async def test_an_order_is_charged_and_its_invoice_is_written(jobs: Jobs) -> None:
    charged = await charge.enqueue(ORDER)
    await jobs.drain()  # runs all jobs to their end, also those that jobs enqueue
    assert await charged.result() == PAID


async def test_charging_enqueues_the_invoice(jobs: Jobs) -> None:
    assert await jobs.run(charge, ORDER) == PAID  # one run, without a queue
    jobs.assert_enqueued(invoice, order=ORDER, payment=PAID)


async def test_a_bank_that_fails_once_is_asked_again(jobs: Jobs) -> None:
    with app.override(FailsOnce()):
        charged = await charge.enqueue(ORDER)
        drained = await jobs.drain(raises=False)  # it does not wait for the backoff
    assert (drained.retried, drained.completed) == (1, 2)
    assert await charged.result() == PAID


async def test_who_is_broke_is_not_asked_again(jobs: Jobs) -> None:
    await charge.enqueue(Order("broke@example.com", []))
    with pytest.raises(UnrecoverableError, match="refused to charge"):
        await jobs.drain()
    jobs.refute_enqueued(invoice)


async def test_the_report_adds_up(jobs: Jobs) -> None:
    bank = Bank()
    bank.payments[ORDER.id] = Decimal("9.00")
    with app.override(bank):
        assert await jobs.run(report) == "1 orders, 9.00 in all"


class FailsOnce(Bank):
    is_down = True

    async def charge(self, order_id: UUID, customer: str, amount: Decimal) -> str:
        if self.is_down:
            self.is_down = False
            raise ConnectionError("the bank does not answer")
        return await super().charge(order_id, customer, amount)
