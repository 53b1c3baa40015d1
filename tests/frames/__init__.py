"""The commands that clients send, recorded: a change that must not change a byte is held to that.

`python -m tests.frames record --out F` plays fixed scenes on real servers, through a tap that keeps
every byte from the client, and writes one line for each command. `python -m tests.frames compare A
B` shows the first command that differs. `golden.txt` holds what the scenes sent when it was
recorded, and `test_frames.py` records them anew.

What differs between two runs of the same code is replaced:

- A job id, an entry id, a UUID or a default consumer id becomes `<ulid:1>`, `<entry:1>`,
  `<uuid:1>` or `<consumer:1>`. The same value has the same number throughout its scene.
- The client's clock stands still while scenes play. Its time is `<t0>`, and an hour later is
  `<t0+3600s>`. Times of the server's clock are `<now>`, others `<ms>`.
- The duration of a run is `<us>`, the longest wait of a read `<wait>`, the version of the library
  `<version>`. Of a traceback the last line stays.
- Scripts have their names. The table at the top has the SHA1 of each: a changed text shows there.

A scene of one producer is compared command by command, connection by connection. A worker does
several things at once, and time decides how often it reads. Its scenes are *loose*: each connection
has its distinct commands, sorted by kind, and within a kind in the order in which they first came.
Such scenes run one job at a time, or end many jobs in the same turn of the event loop, so that
every run groups acknowledgements alike. A line that begins with `?` is sent only if enough time
passes. Where both recordings have such lines of one kind, they need to have one in common.

Not recorded: how commands are grouped into writes, and the order between connections.
"""
