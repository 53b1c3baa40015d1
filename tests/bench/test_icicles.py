"""Profiles as trees: what is drawn, and under which name."""

from bench.icicles import Frame, label

STACKS = """\
<module> (bench/peers/chasqui.py:23);Runner.run (asyncio/runners.py:118);uv_run (core.c:452);\
Py_DECREF (object.h:602);Link.send (chasqui/link.py:44);write (/usr/lib/libc.so.6) 3
<module> (bench/peers/chasqui.py:23);Runner.run (asyncio/runners.py:118);uv_run (core.c:452);\
uv_run (core.c:460);__pyx_pw_7chasqui_5_core_7payload_3pack (chasqui/_core/payload.c:12) 2
<module> (bench/peers/chasqui.py:23);_find_and_load (<frozen importlib._bootstrap>:1176) 9
"""


def test_tree_holds_what_the_event_loop_does() -> None:
    root = Frame.read(STACKS)
    assert root.samples == 5, "imports are no work"
    (loop,) = root.calls.values()
    assert {name: call.samples for name, call in loop.calls.items()} == {
        "Link.send (chasqui)": 3,
        "payload_3pack (_core)": 2,
    }


def test_label_has_no_folder_and_no_line() -> None:
    assert label("write (/usr/lib/libc.so.6)") == "write (libc.so.6)"
    assert label("uv_run (core.c:452)") == "uv_run (event loop)"
    assert label("0x7fe242c4524a") == "0x7fe242c4524a"
