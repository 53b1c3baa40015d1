"""`dlq peek`, `show`, `replay`, `delete`."""

from collections.abc import Callable

import pytest

from tests.cli.conftest import Chasqui, run_in_terminal
from tests.servers import Server


def test_peek_lists_the_dead_and_counts_their_reasons(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    first = bury("mail", {"to": "ada"}, "retries_exhausted", error="TimeoutError: no answer")
    bury("sms", 1, "unrecoverable", detail="no such number")
    ran = chasqui("dlq", "peek", queue_name)
    entries, _, reasons = ran.out.partition("\n\n")
    assert first in entries
    assert "no such number" in entries
    assert reasons.splitlines() == ["reason\tjobs", "retries_exhausted\t1", "unrecoverable\t1"]
    (row,) = chasqui("dlq", "peek", queue_name, "--name", "mail", "--json").json
    assert (row["dlq_id"], row["source_id"], row["job_id"]) == (first, "5-0", "id-mail")
    assert chasqui("dlq", "peek", queue_name, "--until", "1h").out == "no dead jobs\n"


def test_peek_says_what_the_limit_left_out(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    for name in ("mail", "mail", "mail", "sms"):
        bury(name, 1, "retries_exhausted")

    def last_line(*more: str) -> str:
        return chasqui("dlq", "peek", queue_name, *more).out.splitlines()[-1]

    assert last_line("--limit", "2") == "2 of 4 entries (--limit 2) shown"
    selected = ("--name", "mail", "--limit", "2")
    assert last_line(*selected) == "2 of the 3 entries that match (--limit 2) shown"
    assert last_line("--limit", "4") == last_line() == "retries_exhausted\t4"


@pytest.mark.slow
def test_peek_in_a_terminal_leaves_ids_whole(
    valkey_9: Server, queue_name: str, bury: Callable[..., str]
) -> None:
    error = "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 25)"
    dlq_id = bury("welcome-mail", {"to": "ada"}, "retries_exhausted", error=error)
    shown = run_in_terminal("dlq", "peek", queue_name, url=valkey_9.url).out
    header, row, *_ = shown.splitlines()
    assert header.split("  ")[0] == "dlq id"
    assert row.split()[0] == dlq_id
    assert "welcome-mail  id-welcome-mail  " in row
    assert max(map(len, shown.splitlines())) <= 80


def test_show_tells_everything_about_one(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    dlq_id = bury(
        "mail", {"to": "ada"}, "retries_exhausted", traceback="File x\n  raise", attempts="3"
    )
    told = chasqui("dlq", "show", queue_name, dlq_id, "--json").json
    assert told["data"] == {"to": "ada"}
    assert told["attempts"] == 3
    shown = chasqui("dlq", "show", queue_name, dlq_id).out
    assert 'data\t{"to": "ada"}\n' in shown
    assert "traceback\tFile x\n\t  raise\n" in shown
    missing = chasqui("dlq", "show", queue_name, "1-1")
    assert (missing.code, missing.out) == (1, "not found\n")


def test_show_counts_all_by_reason_name_and_error(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    for _ in range(3):
        bury("mail", 1, "retries_exhausted", error="boom")
    bury("sms", 1, "malformed")
    assert chasqui("dlq", "show", queue_name, "--json").json == {
        "reason": {"retries_exhausted": 3, "malformed": 1},
        "name": {"mail": 3, "sms": 1},
        "error": {"boom": 3, "": 1},
    }
    assert "mail\t3\n" in chasqui("dlq", "show", queue_name).out


def test_replay_moves_only_with_yes(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    for _ in range(3):
        bury("mail", 1, "retries_exhausted", error="boom")
    bury("sms", 1, "unrecoverable")
    selected = ["dlq", "replay", queue_name, "--error", "boom", "--limit", "2"]
    told = "2 of the 3 entries that match (--limit 2)"
    assert chasqui(*selected).out == f"would replay {told}; add --yes to do it\n"
    outcome = {"replayed": 0, "selected": 2, "matching": 3, "in_dlq": 4}
    assert chasqui(*selected, "--json").json == outcome
    everything = chasqui("dlq", "replay", queue_name, "--limit", "2").out
    assert everything == "would replay 2 of 4 entries (--limit 2); add --yes to do it\n"
    selective = chasqui("dlq", "replay", queue_name, "--error", "boom").out
    assert selective == "would replay 3 of 4 entries; add --yes to do it\n"
    assert chasqui("inspect", queue_name, "--json").json["stream_depth"] == 0
    assert chasqui(*selected, "--yes").out == f"replayed {told}\n"
    facts = chasqui("inspect", queue_name, "--json").json
    assert (facts["stream_depth"], facts["dlq_depth"]) == (2, 2)


def test_delete_deletes_only_with_yes(
    chasqui: Chasqui, queue_name: str, bury: Callable[..., str]
) -> None:
    kept, dropped = bury("mail", 1, "unrecoverable"), bury("mail", 2, "malformed")
    selected = ["dlq", "delete", queue_name, "--id", dropped]
    assert chasqui(*selected).out == "would delete 1 of 2 entries; add --yes to do it\n"
    outcome = {"deleted": 1, "selected": 1, "matching": 1, "in_dlq": 2}
    assert chasqui(*selected, "--yes", "--json").json == outcome
    assert [row["dlq_id"] for row in chasqui("dlq", "peek", queue_name, "--json").json] == [kept]


def test_free_lets_an_id_be_used_again(chasqui: Chasqui, queue_name: str) -> None:
    add = ["add", queue_name, "mail", "1", "--id", "mine"]
    assert chasqui(*add).out == "mine\n"
    assert chasqui("free", queue_name, "mine").rows == [["mine", "freed"]]
    assert chasqui(*add).out == "mine\n"
    again = chasqui("free", queue_name, "mine", "other")
    assert (again.code, again.rows) == (1, [["mine", "freed"], ["other", "was free"]])
