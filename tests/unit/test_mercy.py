"""Mercy: when a reader that lost its link may take over what others hold."""

import math

from chasqui.consumer.mercy import MERCY_S, Mercy


def test_a_first_link_is_free() -> None:
    assert Mercy(15).ends_s(-math.inf, 100.0) == 100.0


def test_a_new_link_waits_for_a_third_of_a_lease_at_most_two_seconds() -> None:
    assert Mercy(3).ends_s(100.0, 100.5) == 101.0
    assert Mercy(3).ends_s(100.0, 101.0) == 101.0
    assert Mercy(15).ends_s(100.0, 100.5) == 100.0 + MERCY_S


def test_links_that_break_again_and_again_put_it_off_for_five_leases() -> None:
    mercy = Mercy(15)
    now_s, free = 100.0, []
    while now_s < 260:
        if mercy.ends_s(now_s, now_s) == now_s:
            free.append(now_s)
        now_s += 0.5
    assert free == [175.0, 250.5]


def test_after_a_chance_the_next_link_waits_again() -> None:
    mercy = Mercy(3)
    assert mercy.ends_s(100.0, 102.0) == 102.0
    assert mercy.ends_s(100.0, 103.0) == 103.0
    assert mercy.ends_s(200.0, 200.0) == 201.0


def test_after_a_long_outage_a_link_waits_also_if_the_one_before_broke_young() -> None:
    mercy = Mercy(15)
    assert mercy.ends_s(100.0, 100.0) == 100.0 + MERCY_S
    assert mercy.ends_s(130.0, 130.0) == 130.0 + MERCY_S
