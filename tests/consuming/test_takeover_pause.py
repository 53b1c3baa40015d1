"""TakeoverPause: when a reader that lost its link may take over what others hold."""

import math

from chasqui.consuming.takeover_pause import MAX_PAUSE_S, TakeoverPause


def test_a_first_link_is_free() -> None:
    assert TakeoverPause(15).until_s(-math.inf, 100.0) == 100.0


def test_a_new_link_waits_for_a_third_of_a_lease_at_most_two_seconds() -> None:
    assert TakeoverPause(3).until_s(100.0, 100.5) == 101.0
    assert TakeoverPause(3).until_s(100.0, 101.0) == 101.0
    assert TakeoverPause(15).until_s(100.0, 100.5) == 100.0 + MAX_PAUSE_S


def test_links_that_break_again_and_again_put_it_off_for_five_leases() -> None:
    pause = TakeoverPause(15)
    now_s, free = 100.0, []
    while now_s < 260:
        if pause.until_s(now_s, now_s) == now_s:
            free.append(now_s)
        now_s += 0.5
    assert free == [175.0, 250.5]


def test_after_a_chance_the_next_link_waits_again() -> None:
    pause = TakeoverPause(3)
    assert pause.until_s(100.0, 102.0) == 102.0
    assert pause.until_s(100.0, 103.0) == 103.0
    assert pause.until_s(200.0, 200.0) == 201.0


def test_after_a_long_outage_a_link_waits_also_if_the_one_before_broke_young() -> None:
    pause = TakeoverPause(15)
    assert pause.until_s(100.0, 100.0) == 100.0 + MAX_PAUSE_S
    assert pause.until_s(130.0, 130.0) == 130.0 + MAX_PAUSE_S
