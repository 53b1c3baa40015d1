"""The client of a bank. This one has no bank behind it, and knows who is broke."""

from decimal import Decimal
from uuid import UUID


class CardRefused(Exception):
    """The customer cannot pay."""


class Bank:
    def __init__(self) -> None:
        self.payments: dict[UUID, Decimal] = {}

    async def charge(self, order_id: UUID, customer: str, amount: Decimal) -> str:
        """The number of the payment. A task may run twice, so the bank knows an order by its id
        and charges it once."""
        if customer.startswith("broke@"):
            raise CardRefused(f"the bank refused to charge {customer}")
        self.payments[order_id] = amount
        return f"payment-{order_id}"
