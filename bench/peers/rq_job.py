"""The job that RQ finds by its name, in a module that is imported once."""

from bench.peers.tasks import Data


def handle(data: Data) -> None:
    """What to do with a job; the worker puts the scenario's function in its place."""


def welcome(data: Data) -> None:
    handle(data)
