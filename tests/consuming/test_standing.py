"""Standing: which entries were left behind by a clock that was set back."""

from chasqui.consuming.standing import LOOKS_A_LEASE, MIN_LOOKS, Standing

LEASE_S = 4.0
ROW = (b"1-1", b"dead", 0, 1)


def looks(rows_at: list[tuple[bytes, bytes, int, int]]) -> list[int]:
    """At which of these looks the entry is taken for left behind."""
    standing = Standing(LEASE_S)
    step_s = LEASE_S / LOOKS_A_LEASE
    return [n for n, row in enumerate(rows_at) if standing.look([row], 100 + n * step_s)]


def test_one_that_stands_still_for_two_leases() -> None:
    assert looks([ROW] * 12)[0] == 2 * LOOKS_A_LEASE


def test_one_whose_idle_time_goes_on_once_begins_anew() -> None:
    renewed = (b"1-1", b"dead", 1, 1)
    assert looks([ROW] * (MIN_LOOKS - 1) + [renewed] + [ROW] * MIN_LOOKS) == []


def test_another_delivery_or_owner_begins_anew() -> None:
    for other in ((b"1-1", b"heir", 0, 1), (b"1-1", b"dead", 0, 2)):
        assert looks([ROW] * (MIN_LOOKS - 1) + [other] * MIN_LOOKS) == []
