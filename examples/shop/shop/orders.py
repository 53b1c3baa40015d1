"""What is ordered, and what comes of it."""

from dataclasses import dataclass, field
from decimal import Decimal
from uuid import UUID, uuid4


@dataclass
class Line:
    item: str
    price: Decimal
    count: int = 1


@dataclass
class Order:
    customer: str
    lines: list[Line]
    #: A client that sends an order again sends its id too, and is charged once.
    id: UUID = field(default_factory=uuid4)

    @property
    def total(self) -> Decimal:
        return sum((line.price * line.count for line in self.lines), Decimal(0))


@dataclass
class Payment:
    number: str
    amount: Decimal
