"""`add`, `inspect`, `queues`, `delayed`, `repeatable`, `pause`, `resume`, `obliterate`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from chasqui._core.envelope import encode_delayed_member, encode_envelope
from chasqui.model.keys import Keys
from chasqui.model.payload import encode
from tests.cli.conftest import Chasqui, call, run_in_terminal
from tests.servers import RemoteServer, Server


def test_jobs_are_added_and_seen_on_every_server(
    server: Server | RemoteServer, queue_name: str
) -> None:
    url = server.url
    assert call("add", queue_name, "mail", '{"to": "ada"}', url=url).code == 0
    assert call("add", queue_name, "mail", "null", "--delay", "1h", url=url).code == 0
    assert call("repeatable", "add", queue_name, "mail", "--every", "1h", url=url).code == 0
    facts = call("inspect", queue_name, "--json", url=url).json
    assert facts["oldest_job_in_stream_ms"] >= 0
    del facts["oldest_job_in_stream_ms"]
    assert facts == {
        "stream_depth": 1,
        "pending": 0,
        "dlq_depth": 0,
        "delayed_depth": 1,
        "oldest_delayed_lag_ms": 0,
        "repeatable_count": 1,
        "paused": False,
        "live_workers": 0,
        "silent_workers": 0,
        "events": 0,
        "events_kept": 100_000,
        "event_readers": [],
        "history": 0,
    }
    listed = {row["queue"]: row for row in call("queues", "--json", url=url).json}
    assert listed[queue_name]["waiting"] == 1
    assert call("doctor", url=url).err == ""


def test_inspect_prints_the_rows_of_chasquimq_first(chasqui: Chasqui, queue_name: str) -> None:
    chasqui("add", queue_name, "mail", "1")
    ran = chasqui("inspect", queue_name)
    assert ran.out.splitlines()[:6] == [
        "stream depth\t1",
        "pending\t0 (group not created)",
        "DLQ depth\t0",
        "delayed depth\t0",
        "oldest delayed lag (ms)\t-",
        "repeatable count\t0",
    ]


def test_inspect_counts_what_a_worker_has(
    chasqui: Chasqui, valkey_9: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chasqui("add", queue_name, "mail", "1")
    stream = Keys(queue_name).stream
    with redis.Redis.from_url(valkey_9.url) as client:
        client.xgroup_create(stream, "default", "0")
        client.xreadgroup("default", "somebody", {stream: ">"})
    monkeypatch.setattr("chasqui.cli.facts.uptime_s", lambda info: 60.0)
    told = chasqui("inspect", queue_name).out
    assert "pending\t1\n" in told
    assert "live workers\t1\n" in told
    monkeypatch.setattr("chasqui.cli.facts.uptime_s", lambda info: 59.0)
    assert "live workers\t-\nsilent workers\t-\n" in chasqui("inspect", queue_name).out
    assert "pending\t0 (group not created)\n" in chasqui("inspect", queue_name, "--group", "x").out


def test_second_job_of_an_id_is_not_added(chasqui: Chasqui, queue_name: str) -> None:
    assert chasqui("add", queue_name, "mail", "1", "--id", "one").out == "one\n"
    assert chasqui("add", queue_name, "mail", "1", "--id", "one").out == "one was there already\n"
    again = chasqui("add", queue_name, "mail", "1", "--id", "one", "--json")
    assert again.json == {"id": "one", "is_new": False}
    assert chasqui("inspect", queue_name, "--json").json["stream_depth"] == 1


def test_data_is_null_unless_given(chasqui: Chasqui, queue_name: str) -> None:
    job_id = chasqui("add", queue_name, "digest").out.strip()
    told = chasqui("job", queue_name, job_id, "--json").json
    assert (told["name"], told["data"]) == ("digest", None)


def test_options_reach_the_envelope(chasqui: Chasqui, valkey_9: Server, queue_name: str) -> None:
    chasqui("add", queue_name, "mail", "[1]", "--attempts", "3", "--backoff", "2s")
    with redis.Redis.from_url(valkey_9.url) as client:
        ((_, fields),) = client.xrange(Keys(queue_name).stream)
    assert fields[b"n"] == b"mail"
    assert fields[b"d"].endswith(b"\x92\x03\x95\xa5fixed\xcd\x07\xd0\xc0\xc0\xc0")


def test_file_is_added_line_by_line(chasqui: Chasqui, queue_name: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    lines = [json.dumps({"name": "mail", "data": {"i": i}}) for i in range(2500)]
    lines[10] = json.dumps({"name": "mail", "data": 1, "delay_ms": 3_600_000, "job_id": "late"})
    path.write_text("\n".join([*lines, "", lines[10]]) + "\n")
    ran = chasqui("add", queue_name, "--from", str(path), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["added"], ran.json["already_there"]) == (2500, 1)
    facts = chasqui("inspect", queue_name, "--json").json
    assert (facts["stream_depth"], facts["delayed_depth"]) == (2499, 1)


def test_broken_line_is_named_with_the_way_on(
    chasqui: Chasqui, queue_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.jsonl"
    good = '{"data": 1}\n'
    path.write_text(good * 1500 + '{"data": 1, "color": "red"}\n' + good)
    ran = chasqui("add", queue_name, "mail", "--from", str(path))
    assert ran.code == 2
    assert "chasqui: line 1501: unknown option 'color'" in ran.err
    assert "lines 1 to 1000 are in: go on with --skip 1000" in " ".join(ran.err.split())
    path.write_text(path.read_text().replace(', "color": "red"', ""))
    ran = chasqui("add", queue_name, "mail", "--from", str(path), "--skip", "1000")
    assert ran.out.startswith("added 502 jobs")
    assert ran.err == "", "a progress bar is for a terminal"
    assert chasqui("inspect", queue_name, "--json").json["stream_depth"] == 1502


def test_bulk_that_is_in_by_half_is_told(
    private_server: Callable[..., Server], queue_name: str, tmp_path: Path
) -> None:
    server = private_server("valkey-9")
    source = tmp_path / "jobs.jsonl"
    source.write_text("".join(f'{{"name": "n", "data": "{"x" * 2000}"}}\n' for _ in range(3000)))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 4_000_000)
        ran = call("add", queue_name, "--from", str(source), url=server.url)
        there = client.xlen(Keys(queue_name).stream)
    assert ran.code == 1
    done = there // 1000 * 1000
    told = f"lines 1 to {done} are in, and some of those up to {done + 1000} may be"
    assert (told in " ".join(ran.err.split())) == (there > done)
    assert there % 1000  # else the limit is to be chosen anew


def test_line_that_is_not_json_is_named(chasqui: Chasqui, queue_name: str) -> None:
    ran = chasqui("add", queue_name, "--from", "-", stdin='{"name": "a", "data": 1}\n[]\n')
    assert ran.code == 2
    assert "chasqui: line 2 is not a job" in ran.err
    ran = chasqui("add", queue_name, "--from", "-", stdin="{\n")
    assert "chasqui: line 1 is not JSON" in ran.err


def test_delayed_job_is_listed_and_cancelled(chasqui: Chasqui, queue_name: str) -> None:
    job_id = chasqui("add", queue_name, "mail", "1", "--delay", "1h").out.strip()
    ((_, name, listed_id, attempt),) = chasqui("delayed", "list", queue_name).rows
    assert (name, listed_id, attempt) == ("mail", job_id, "1")
    assert chasqui("delayed", "cancel", queue_name, job_id).rows == [[job_id, "cancelled"]]
    again = chasqui("delayed", "cancel", queue_name, job_id)
    assert (again.code, again.rows) == (1, [[job_id, "not found"]])
    assert chasqui("delayed", "list", queue_name).out == "no delayed jobs\n"


def test_repeatable_job_is_added_listed_and_removed(chasqui: Chasqui, queue_name: str) -> None:
    cron = ["--cron", "0 8 * * *", "--tz", "Europe/Madrid", "--missed", "fire-all:3"]
    key = chasqui("repeatable", "add", queue_name, "digest", "{}", *cron, "--json").json["key"]
    assert key == "digest::cron:0 8 * * *:Europe/Madrid"
    (row,) = chasqui("repeatable", "list", queue_name, "--json").json
    assert row["key"] == key
    assert row["pattern"] == {"kind": "cron", "expression": "0 8 * * *", "tz": "Europe/Madrid"}
    assert row["missed_fires"] == {"kind": "fire-all", "max_catchup": 3}
    removed = chasqui("repeatable", "remove", queue_name, key)
    assert (removed.code, removed.out) == (0, "removed\n")
    gone = chasqui("repeatable", "remove", queue_name, key)
    assert (gone.code, gone.out) == (1, "")
    assert gone.err == f"chasqui: queue {queue_name} has no repeatable job {key!r}\n"
    chasqui("repeatable", "add", queue_name, "mail", "--every", "1h", "--key", "daily-mail")
    misspelled = chasqui("repeatable", "remove", queue_name, "dayly-mail")
    assert misspelled.err.endswith("has no repeatable job 'dayly-mail': is it 'daily-mail'?\n")
    in_json = chasqui("repeatable", "remove", queue_name, "dayly-mail", "--json").json
    assert in_json == {"key": "dayly-mail", "removed": False, "near": ["daily-mail"]}
    chasqui("repeatable", "remove", queue_name, "daily-mail")


def test_repeatable_job_of_the_same_key_is_replaced(chasqui: Chasqui, queue_name: str) -> None:
    add = ["repeatable", "add", queue_name, "digest", "{}", "--key", "daily", "--json"]
    assert chasqui(*add, "--cron", "0 8 * * *").json == {"key": "daily"}
    assert chasqui(*add, "--cron", "0 9 * * *").json == {"key": "daily"}
    (row,) = chasqui("repeatable", "list", queue_name, "--json").json
    assert (row["key"], row["pattern"]["expression"]) == ("daily", "0 9 * * *")
    assert chasqui("repeatable", "remove", queue_name, "daily").code == 0


def test_pause_and_resume(chasqui: Chasqui, queue_name: str) -> None:
    chasqui("add", queue_name, "mail", "1")
    assert chasqui("pause", queue_name).out.startswith(f"queue {queue_name} paused")
    assert chasqui("inspect", queue_name, "--json").json["paused"] is True
    assert queue_name in [row[0] for row in chasqui("queues").rows]
    assert chasqui("resume", queue_name).out == f"queue {queue_name} resumed\n"
    assert chasqui("inspect", queue_name, "--json").json["paused"] is False


def test_obliterate_needs_yes_and_force(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    chasqui("add", queue_name, "mail", "1")
    assert chasqui("obliterate", queue_name, "--yes").code == 2
    ran = chasqui("obliterate", queue_name, "--force")
    assert ran.out.startswith(f"would delete queue {queue_name}: 1 waiting")
    assert chasqui("inspect", queue_name, "--json").json["stream_depth"] == 1
    deleted = chasqui("obliterate", queue_name, "--force", "--yes").out
    assert re.fullmatch(rf"deleted (1 key|\d+ keys) of queue {queue_name}\n", deleted)
    with redis.Redis.from_url(valkey_9.url) as client:
        assert list(client.scan_iter(Keys(queue_name).pattern, 10_000)) == []


def test_terminal_gets_a_table_of_80_columns_that_cuts_nothing(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    name = "a-name-that-is-rather-long-" * 3
    chasqui("add", queue_name, name, "1", "--delay", "1h", "--id", "x" * 60)
    shown = run_in_terminal("delayed", "list", queue_name, url=valkey_9.url)
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    assert shown.out.count("x") >= 60


def test_name_cannot_command_the_terminal(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    chasqui("add", queue_name, "\x1b[2Jgone", "1", "--delay", "1h")
    for ran in (
        chasqui("delayed", "list", queue_name),
        run_in_terminal("delayed", "list", queue_name, url=valkey_9.url),
    ):
        assert "\x1b[2J" not in ran.out
        assert "\\x1b[2J" in ran.out.replace("\n", "")


def test_time_that_no_calendar_has_is_shown_as_it_is(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    keys, far_ms = Keys(queue_name), 10**15
    with redis.Redis.from_url(valkey_9.url) as client:
        for job_id, due in (("near", 0.0), ("far", float(far_ms)), ("never", float("inf"))):
            member = encode_delayed_member("n", encode_envelope(job_id, encode(1), 2**63))
            client.zadd(keys.delayed, {member: due})
            client.set(keys.didx(job_id), member)
        client.xadd(keys.dlq, {"d": b"", "reason": "x"}, id=f"{far_ms}-0")
        client.xadd(keys.events, {"e": "active", "id": "gone", "attempt": "1"})
        client.xadd(keys.events, {"e": "active", "id": "gone", "attempt": "many"})
    listed = chasqui("delayed", "list", queue_name, "--json").json
    assert [one["job_id"] for one in listed] == ["near", "far", "never"]
    assert listed[1]["due"] == far_ms
    for job_id in ("far", "never"):
        found = chasqui("job", queue_name, job_id, "--json").json
        assert (found["state"], found["created"]) == ("delayed", 2**63)
    assert chasqui("dlq", "peek", queue_name, "--json").json[0]["dead_since"] == far_ms
    assert chasqui("job", queue_name, "gone", "--json").json["attempts"] == 1


def test_purge_deletes_what_nobody_has_begun_on_every_server(
    server: Server | RemoteServer, queue_name: str
) -> None:
    url, keys = server.url, Keys(queue_name)
    for job_id in ("held", "first", "second"):
        call("add", queue_name, "mail", "1", "--id", job_id, url=url)
    call("add", queue_name, "mail", "1", "--id", "late", "--delay", "1h", url=url)
    with redis.Redis.from_url(url) as client:
        client.xgroup_create(keys.stream, "default", "0")
        client.xreadgroup("default", "somebody", {keys.stream: ">"}, count=1)
    would = call("purge", queue_name, "--delayed", url=url).out
    assert would == "would delete 2 waiting and 1 delayed jobs; add --yes to do it\n"
    assert call("purge", queue_name, "--yes", url=url).out == "deleted 2 waiting jobs\n"
    facts = call("inspect", queue_name, "--json", url=url).json
    assert (facts["stream_depth"], facts["pending"], facts["delayed_depth"]) == (1, 1, 1)
    purged = call("purge", queue_name, "--delayed", "--yes", "--json", url=url).json
    assert purged == {"waiting": 0, "delayed": 1, "deleted": True}
    for job_id in ("first", "late"):
        assert call("add", queue_name, "mail", "1", "--id", job_id, url=url).out == f"{job_id}\n"
    taken = call("add", queue_name, "mail", "1", "--id", "held", url=url).out
    assert taken == "held was there already\n"


def test_purge_goes_through_many_pages(chasqui: Chasqui, queue_name: str) -> None:
    lines = [json.dumps({"name": "mail", "data": i}) for i in range(1201)]
    lines += [json.dumps({"name": "m", "data": i, "delay_ms": 9_000_000}) for i in range(1201)]
    chasqui("add", queue_name, "--from", "-", stdin="\n".join(lines))
    ran = chasqui("purge", queue_name, "--delayed", "--yes")
    assert ran.out == "deleted 1,201 waiting and 1,201 delayed jobs\n"
    facts = chasqui("inspect", queue_name, "--json").json
    assert (facts["stream_depth"], facts["delayed_depth"]) == (0, 0)


def test_the_old_name_of_purge_works_and_warns(chasqui: Chasqui, queue_name: str) -> None:
    chasqui("add", queue_name, "mail", "1")
    ran = chasqui("drain", queue_name, "--yes")
    assert ran.out == "deleted 1 waiting job\n"
    assert "`drain` is now called `purge`" in ran.err
    listed = [line.split()[0] for line in chasqui("--help").out.splitlines() if line.strip()]
    assert "purge" in listed
    assert "drain" not in listed


def test_a_job_that_left_no_trace_shows_when_its_id_was_drawn(
    chasqui: Chasqui, queue_name: str
) -> None:
    chasqui("add", queue_name, "mail", "1")
    unknown = chasqui("job", queue_name, "01JH8ZT4Q5Y0V0Y9M5S1M3E7WX", "--json").json
    assert (unknown["state"], unknown["created"]) == ("unknown", "2025-01-10T20:52:07.525Z")
    own = chasqui("job", queue_name, "mine", "--json").json
    assert (own["state"], own["created"]) == ("unknown", None)


def test_next_fires_are_those_of_all_repeatable_jobs(chasqui: Chasqui, queue_name: str) -> None:
    chasqui("repeatable", "add", queue_name, "tick", "--every", "10s", "--limit", "2")
    chasqui("repeatable", "add", queue_name, "digest", "--cron", "0 0 1 1 *")
    rows = chasqui("repeatable", "next", queue_name, "4").rows
    assert [row[1] for row in rows] == ["tick", "tick", "digest", "digest"]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert all(row[0].endswith("-01-01T00:00:00.000Z") for row in rows[2:])
    key = rows[0][2]
    assert len(chasqui("repeatable", "next", queue_name, "--key", key).rows) == 2
    assert chasqui("repeatable", "next", queue_name, "--key", "x").out == "no fires to come\n"


def test_a_queue_that_cannot_be_counted_hides_no_other(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    broken = f"{queue_name}-broken"
    chasqui("add", queue_name, "mail", "1")
    with redis.Redis.from_url(valkey_9.url) as client:
        client.set(Keys(broken).delayed, "no sorted set")
        try:
            listed = chasqui("queues", "--json")
        finally:
            client.delete(Keys(broken).delayed)
    rows = {row["queue"]: row for row in listed.json}
    assert rows[queue_name]["waiting"] == 1
    assert rows[broken]["waiting"] is None
    assert f"queue {broken} cannot be counted: WRONGTYPE" in listed.err
