"""The error tree: what a moved program's `except` clauses catch, and what survives a process."""

import inspect
import pickle

import pytest

from chasqui import errors
from chasqui.errors import (
    BatchError,
    ChasquiError,
    JobFailedError,
    PayloadError,
    PayloadTooLargeError,
    QueueFullError,
    Retry,
)

SAMPLES = [
    errors.AuthenticationError("no"),
    errors.ClosedError("no"),
    errors.ContextError("no"),
    errors.EmbeddedServerError("no"),
    errors.LeaseLostError("no"),
    errors.NotSupportedError("no"),
    errors.OutcomeUnknownError("no"),
    errors.ServerError("WRONGTYPE no"),
    errors.TaskDataError("no"),
    errors.UnknownArgumentsError("no"),
    errors.UnreadableError("no"),
    errors.UnreachableError("no"),
    errors.UnrecoverableError("no"),
    errors.ConversionError(".price", "a Decimal", "str").within("order"),
    errors.ResultError("result[1]", "a Decimal", "int"),
    BatchError({"a": ValueError("bad")}, results={"b": 1}),
    JobFailedError("a", "unrecoverable", "no handler"),
    PayloadError("no"),
    PayloadTooLargeError(11, 10),
    QueueFullError("mail", 11, 10),
    Retry("later", delay_ms=5),
]


def test_every_error_is_exported_and_has_a_sample() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert set(errors.__all__) == defined
    assert {type(sample).__name__ for sample in SAMPLES} == defined - {"ChasquiError"}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_is_a_runtime_error_and_survives_pickling(error: ChasquiError) -> None:
    assert isinstance(error, ChasquiError)
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy).keys() == vars(error).keys()


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.UnreachableError, ConnectionError)
    assert issubclass(PayloadTooLargeError, ValueError)
    assert issubclass(errors.ConversionError, TypeError)


def test_messages_carry_their_facts() -> None:
    assert str(QueueFullError("mail", 11, 10)) == (
        "queue 'mail' is full: 11 jobs wait, max_backlog is 10"
    )
    assert str(PayloadTooLargeError(11, 10)) == "the payload takes 11 bytes, and 10 is the limit"
    assert str(JobFailedError("a", "unrecoverable", "no handler")) == (
        "job a went to the dead-letter queue (unrecoverable): no handler"
    )
    assert (
        str(JobFailedError("a", "malformed")) == "job a went to the dead-letter queue (malformed)"
    )
    assert (
        str(BatchError({"a": ValueError("bad")})) == "1 of the batch failed (a: ValueError('bad'))"
    )


def test_a_batch_error_keeps_its_results() -> None:
    error = BatchError({"a": ValueError("bad")}, results={"b": 1})
    assert error.results == pickle.loads(pickle.dumps(error)).results == {"b": 1}
    assert BatchError({}).results == {}
    for wrong in ([1], "b", 1):
        with pytest.raises(TypeError, match="results must be a mapping of job ids"):
            BatchError({}, results=wrong)  # type: ignore[arg-type]


def test_retry_keeps_its_delay() -> None:
    assert Retry().delay_ms is None
    assert Retry(delay_ms=0).delay_ms == 0
    assert pickle.loads(pickle.dumps(Retry("later", delay_ms=7))).delay_ms == 7


@pytest.mark.parametrize(
    ("delay_ms", "error"),
    [(-1, ValueError), (2**52 + 1, ValueError), (True, TypeError), (1.5, TypeError)],
)
def test_retry_refuses_a_bad_delay(delay_ms: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="delay_ms"):
        Retry(delay_ms=delay_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        (["a"], "failures must be a mapping"),
        (None, "failures must be a mapping"),
        ({7: ValueError("bad")}, "ids of jobs as its keys, got int"),
        ({"a": None}, r"failures\['a'\] must be an exception, got NoneType"),
        ({"a": "bad"}, r"failures\['a'\] must be an exception, got str"),
    ],
)
def test_a_batch_error_refuses_what_would_count_as_done(failures: object, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        BatchError(failures)  # type: ignore[arg-type]
