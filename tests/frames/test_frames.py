"""Clients send what they sent when the golden file was recorded, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frames.__main__ import GOLDEN, record
from tests.frames.recording import Recording, differences
from tests.servers import KINDS, Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden() -> Recording:
    return Recording.load(GOLDEN)


@pytest.mark.parametrize("server", KINDS)
def test_commands_are_those_of_the_golden_recording(
    server: str, golden: Recording, shared_server: Callable[[str], Server]
) -> None:
    shared_server(server)  # skips where the machine has none
    found = list(differences(golden.of([server]), record(server)))
    assert not found, (
        "\n".join(found[:3])
        + "\n`python -m tests.frames` has more; `record --golden` accepts it all"
    )


def test_the_golden_recording_covers_every_server(golden: Recording) -> None:
    assert sorted(golden.servers) == sorted(KINDS)


def test_a_recording_is_read_as_it_was_written(golden: Recording, tmp_path: Path) -> None:
    (tmp_path / "again").write_text(golden.dump())
    assert Recording.load(tmp_path / "again") == golden


@pytest.mark.parametrize(
    ("scene", "old", "new", "told"),
    [
        ("add", "\\xc4\\x01\\xc3", "\\xc4\\x01\\xc2", "argument 11"),
        ("add", "mail", "post", "argument 10"),
        ("drain", "XREADGROUP", "XREADGROUPS", "argument 0"),
        ("drain", "<entry:1>", "<entry:2>", "<entry:2>"),
        ("promoter leads", "? GETEX", "? GETEXX", None),
        ("promoter leads", "EX 1", "EX 2", "EX 2"),
    ],
)
def test_a_changed_byte_shows(
    golden: Recording, scene: str, old: str, new: str, told: str | None
) -> None:
    """Only a command that is sent now and then may be missing."""
    ours = golden.of(["valkey-9"])
    lines = [line.replace(old, new, 1) for line in ours.scenes[scene, "valkey-9"]]
    assert lines != ours.scenes[scene, "valkey-9"]
    changed = Recording(ours.scripts, ours.scenes | {(scene, "valkey-9"): lines})
    found = list(differences(ours, changed))
    if told is None:
        assert not found
    else:
        assert len(found) == 1
        assert told in found[0]


def test_a_changed_script_shows_by_its_name(golden: Recording) -> None:
    changed = Recording({**golden.scripts, "ack": "0" * 40}, golden.scenes)
    assert [told.split(":")[0] for told in differences(golden, changed)] == ["script ack"]


def test_a_script_may_have_another_name(golden: Recording) -> None:
    scripts = {name.replace("ack", "settle"): sha for name, sha in golden.scripts.items()}
    scenes = {
        key: [line.replace("-ack>", "-settle>") for line in lines]
        for key, lines in golden.scenes.items()
    }
    assert list(differences(golden, Recording(scripts, scenes))) == []
