"""What the package root offers."""

import chasqui

#: The root of chasquimq 1.3.0: `import chasqui as chasquimq` must find every name.
CHASQUIMQ = {
    "BackoffSpec",
    "Consumer",
    "Handler",
    "Job",
    "MissedFiresPolicy",
    "NotSupportedError",
    "Producer",
    "Queue",
    "QueueEvent",
    "QueueEvents",
    "RepeatPattern",
    "RepeatableMeta",
    "Scheduler",
    "UnrecoverableError",
    "Worker",
    "version",
}


def test_root_has_the_names_of_chasquimq() -> None:
    assert set(chasqui.__all__) >= CHASQUIMQ


def test_names_of_the_root_are_there_and_in_order() -> None:
    assert sorted(chasqui.__all__) == chasqui.__all__
    assert all(hasattr(chasqui, name) for name in chasqui.__all__)
