"""Calls that are wrong; type checkers must find fault with every line marked so."""

from chasqui import Queue, sync


async def asynchronous(queue: Queue) -> None:
    Queue()  # wrong
    Queue("mail", on_full="drop")  # wrong
    Queue("mail", durable="tape")  # wrong
    Queue("mail", "redis://localhost")  # wrong
    await queue.add("mail")  # wrong
    await queue.add("mail", 1, 5)  # wrong
    await queue.add("mail", 1, delay_ms="5")  # wrong
    await queue.add("mail", 1, delay=5)  # wrong
    await queue.add("mail", 1, dealy_ms=5)  # wrong
    await queue.add("mail", 1, attempts="3")  # wrong
    await queue.add("mail", 1, backoff="fast")  # wrong
    await queue.add_unique("mail", 1)  # wrong
    await queue.add_bulk([("mail", 1)])  # wrong
    await queue.replay_dlq(where="failed")  # wrong
    await queue.cancel_delayed(5)  # wrong
    _ = (await queue.counts()).total  # wrong


def blocking(queue: sync.Queue) -> None:
    queue.add("mail", 1, job_id=5)  # wrong
    queue.add_bulk(5)  # wrong
    queue.reschedule("x", delay_ms=[5])  # wrong
