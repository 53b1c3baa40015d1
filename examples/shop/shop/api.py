"""The shop's API: `uvicorn shop.api:api`."""

from typing import Any
from uuid import UUID

from fastapi import FastAPI, HTTPException

from chasqui import JobFailedError, OutcomeUnknownError, UnreachableError
from shop.orders import Order
from shop.tasks import app, charge

api = FastAPI(lifespan=app.asgi)  # it closes the app's connections at the end


@api.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, UUID]:
    try:
        await charge.with_options(job_id=str(order.id)).enqueue(order)
    except (UnreachableError, OutcomeUnknownError):
        raise HTTPException(503, "try again, with the same id") from None
    return {"id": order.id}


@api.get("/orders/{order_id}")
async def show(order_id: UUID) -> dict[str, Any]:
    """The state of an order. It waits for a moment, so most clients ask once."""
    queue = app.queue()
    try:
        payment = await queue.wait_for_result(str(order_id), timeout=2)
    except TimeoutError:
        return {"state": "pending"}  # or there is no such order
    except JobFailedError as error:
        return {"state": "failed", "reason": error.detail}
    invoice = await queue.get_job_result(f"invoice-{order_id}")
    return {"state": "paid", "payment": payment, "invoice": invoice}
