"""Both sides of every contest, measured by pytest-benchmark: `python -m bench.core`."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.contests import CONTESTS, Contest

EVERY = pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)


@EVERY
def test_both_sides_do_the_same_work(contest: Contest):
    assert contest.ours_seen() == contest.theirs_seen()


@EVERY
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_speed(contest: Contest, side: str, benchmark: BenchmarkFixture):
    benchmark.group = contest.name
    benchmark.extra_info.update(side=side, count=contest.count)
    benchmark(getattr(contest, side))
