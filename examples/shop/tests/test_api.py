"""Tests of the shop's API, with the jobs that it enqueues."""

from fastapi.testclient import TestClient

from chasqui.testing import Jobs
from shop.api import api
from shop.tasks import charge

TEA = {"item": "tea", "price": "4.50", "count": 2}


def test_an_order_is_placed_once_and_paid(jobs: Jobs) -> None:
    with TestClient(api) as client:
        placed = client.post("/orders", json={"customer": "ann@example.com", "lines": [TEA]}).json()
        again = {"customer": "ann@example.com", "lines": [TEA], "id": placed["id"]}
        assert client.post("/orders", json=again).json() == placed
        assert len(jobs.all_enqueued(charge)) == 1
        jobs.drain_sync()
        order = client.get(f"/orders/{placed['id']}").json()
    assert order["state"] == "paid"
    assert order["payment"]["amount"] == "9.00"
    assert "2 x tea: 9.00" in order["invoice"]


def test_an_order_that_cannot_be_paid_fails(jobs: Jobs) -> None:
    with TestClient(api) as client:
        placed = client.post("/orders", json={"customer": "broke@a.example", "lines": [TEA]}).json()
        jobs.drain_sync(raises=False)
        order = client.get(f"/orders/{placed['id']}").json()
    assert order["state"] == "failed"
    assert "refused to charge" in order["reason"]


def test_an_order_without_a_customer_is_refused(jobs: Jobs) -> None:
    with TestClient(api) as client:
        assert client.post("/orders", json={"lines": [TEA]}).status_code == 422
    assert jobs.all_enqueued() == []
