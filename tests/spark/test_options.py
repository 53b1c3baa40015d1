"""Wrong options are refused on the driver, in one sentence that names them."""

import pickle
from pathlib import Path

import pytest

from chasqui.spark.options import OptionError, Options, table_of_options
from chasqui.spark.schemas import COLUMNS, check_subset
from chasqui.spark.source import ChasquiDataSource
from chasqui.spark.writing.rows import Mapping
from tests.spark.direct import struct

SCHEMA = "option payloadSchema: in "
SENTENCES = [
    *(
        ("r", {"queue": "q", "payloadSchema": text}, f"{SCHEMA}{text!r} {sentence}")
        for text, sentence in [
            ("a bigit", "column a: there is no type bigit: is it bigint"),
            (
                "a int, b map<string, array<strin>>",
                "column b.value.element: there is no type strin",
            ),
            ("a struct<b: int, c>", "column a.c has no type"),
            ("order_id", "column order_id has no type"),
            ("a array<int", "column a lacks a '>'"),
            ("a array", "column a lacks a '<'"),
            ("a int>", "there is a '>' too many"),
            ("a int,", "a name is missing after the last ','"),
            (", a int", "a name is missing before ','"),
            ("`a int", "a quote is not closed: `a int"),
        ]
    ),
    ("r", {"queue": "q", "payloadSchema": " "}, "option payloadSchema: must not be empty"),
    ("r", {}, "say which queue to read: option queue, or load(<queue>)"),
    ("r", {"queue": "a b"}, "option queue: queue name must be 1 to 200 characters"),
    ("r", {"queue": "q", "tabel": "x"}, "there is no option 'tabel'; did you mean table?"),
    ("r", {"queue": "q", "table": "x"}, "option table: must be one of jobs, events, dlq"),
    ("r", {"queue": "q", "fetchCount": "0"}, "option fetchCount: must be a whole number from 1"),
    ("r", {"queue": "q", "fetchCount": "many"}, "option fetchCount: must be a whole number"),
    ("r", {"queue": "q", "includePending": "yes"}, "option includePending: must be true or false"),
    ("r", {"queue": "q", "delivery": "dedup"}, "option delivery is not for batch reads"),
    ("r", {"queue": "q", "mode": "consume"}, "option mode is not for batch reads"),
    ("r", {"queue": "q", "subscribePattern": "x"}, "give either queue or subscribePattern"),
    ("r", {"subscribePattern": "("}, "option subscribePattern: must be a regular expression"),
    ("r", {"queue": "q", "startingOffsets": "soon"}, "option startingOffsets: must be earliest"),
    (
        "r",
        {"queue": "q", "startingOffsets": "latest", "startingTimestamp": "1"},
        "give either startingOffsets or startingTimestamp",
    ),
    ("r", {"queue": "q", "table": "results"}, "table results needs jobIds, or scan=true"),
    ("r", {"queue": "q", "payloadFormat": "struct"}, "payloadFormat=struct needs payloadSchema"),
    ("r", {"queue": "q", "url": "http://x"}, "option url: redis_url must start with one of"),
    ("r", {"queue": "q", "url": "embedded://"}, "option url: must name a server that executors"),
    ("r", {"queue": "q", "urlEnv": "NO_SUCH_VARIABLE"}, "option urlEnv names the environment"),
    ("s", {"queue": "q"}, "table jobs cannot be followed as a stream: say table=events"),
    ("s", {"queue": "q", "table": "delayed"}, "table delayed cannot be followed as a stream"),
    ("s", {"queue": "q", "mode": "consume"}, "mode=consume needs consumer"),
    ("s", {"queue": "q", "mode": "consume", "consumer": "a b"}, "option consumer: must be 1 to 64"),
    ("s", {"queue": "q", "table": "events", "maxTriggerDelay": "5"}, "option maxTriggerDelay:"),
    ("w", {"queue": "a,b"}, "name one queue to write to"),
    ("w", {"queue": "q", "table": "events"}, "only table jobs can be written, not events"),
    ("w", {"queue": "q", "onBacklog": "drop"}, "option onBacklog: must be one of wait, fail"),
    ("w", {"queue": "q", "txnVersion": "3"}, "option txnVersion needs txnAppId"),
]


@pytest.mark.parametrize(("use", "given", "sentence"), SENTENCES)
def test_a_wrong_option_is_named_in_one_sentence(use: str, given: dict[str, str], sentence: str):
    with pytest.raises(OptionError) as raised:
        Options.parse(given, use)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_keys_come_in_any_case_and_under_their_other_names():
    assert Options.parse({"SUBSCRIBE": "a,b", "FETCHcount": "7"}, "r").queue == ("a", "b")
    assert Options.parse({"path": "orders"}, "r").queue == ("orders",)
    assert Options.parse({"queue": "q", "checkpointLocation": "/x"}, "w").queue == ("q",)


@pytest.mark.parametrize(
    "url", ["redis://:canary@host", "redis+sentinel://host?sentinel_password=canary"]
)
def test_a_password_is_refused_in_url_and_never_told(url: str):
    with pytest.raises(OptionError, match="urlEnv") as raised:
        Options.parse({"queue": "q", "url": url}, "r")
    assert "canary" not in str(raised.value)


def test_a_password_in_the_environment_enters_no_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUEUE_URL", "redis://me:canary@host:7000")
    options = Options.parse({"queue": "q", "urlEnv": "QUEUE_URL"}, "r")
    assert options.endpoint().hosts == (("host", 7000),)
    assert b"canary" not in pickle.dumps(options)
    assert "canary" not in repr(options)
    monkeypatch.setenv("QUEUE_URL", "redis://me:canary@host:port")
    with pytest.raises(OptionError, match="QUEUE_URL") as raised:
        Options.parse({"queue": "q", "urlEnv": "QUEUE_URL"}, "r")
    assert "canary" not in str(raised.value)


def test_overwrite_is_refused():
    source = ChasquiDataSource({"queue": "q"})
    for make in (source.writer, source.streamWriter):
        with pytest.raises(OptionError, match="a queue is only added to"):
            make(struct(n="bigint"), True)


def test_a_schema_given_by_hand_must_be_a_part_of_the_tables_own():
    options = Options.parse({"queue": "q", "table": "events"}, "r")
    check_subset(struct(event="string", ts="timestamp"), options)
    with pytest.raises(OptionError, match="table events has no column 'evnt'; it has queue"):
        check_subset(struct(evnt="string"), options)
    with pytest.raises(OptionError, match="column 'ts' of table events is timestamp"):
        check_subset(struct(ts="string"), options)


def test_columns_to_write_are_checked():
    options = Options.parse({"queue": "q"}, "w")
    with pytest.raises(OptionError, match="column 'run_at' must be timestamp"):
        Mapping.of(options, struct(n="bigint", run_at="string"))
    with pytest.raises(OptionError, match="option idColumn: there is no column 'key' among n"):
        Mapping.of(Options.parse({"queue": "q", "idColumn": "key"}, "w"), struct(n="bigint"))
    with pytest.raises(OptionError, match="delivery=dedup needs a column of ids"):
        Mapping.of(Options.parse({"queue": "q", "delivery": "dedup"}, "w"), struct(n="bigint"))
    with pytest.raises(OptionError, match="say which queue to write to"):
        Mapping.of(Options.parse({}, "w"), struct(n="bigint"))


def test_every_option_says_what_it_means():
    rows = table_of_options()
    assert len({name for name, *_ in rows}) == len(rows) > 40
    assert all(meaning.endswith(".") for *_, meaning in rows)


def test_the_page_of_the_docs_lists_every_option_and_column():
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    for name, default, where, meaning in table_of_options():
        shown = default if default == "-" else f"`{default}`"
        assert f"| `{name}` | {shown} | {where} | {meaning} |" in page
    for table, columns in COLUMNS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{table}` |"))
        assert all(f"`{column}`" in row for column in columns)


@pytest.mark.parametrize(
    "text",
    [
        "order_id bigint, to string",
        "ORDER_ID BIGINT NOT NULL COMMENT 'it''s, <one>', b: Decimal(10, 2)",
        '`a b` int, `c``d` struct<e: array<map<string, struct<>>>, f: timestamp_ntz> comment "x"',
        "a interval day to second, b string collate UTF8_BINARY, c varchar(3), ünï double",
    ],
)
def test_a_payload_schema_that_spark_takes_is_left_to_it(text: str):
    assert Options.parse({"queue": "q", "payloadSchema": text}, "r").payload_schema == text
