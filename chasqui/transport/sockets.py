"""What both kinds of link do alike with sockets, names and memory."""

import mmap
import socket
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any, Final, TypeAlias

#: How long a dial may take.
CONNECT_TIMEOUT_S: Final = 5.0
#: The head start that an address of a host has before the next is tried too (RFC 8305).
ATTEMPT_DELAY_S: Final = 0.25
#: How long the kernel waits for a silent peer to acknowledge what was sent.
TCP_USER_TIMEOUT_MS: Final = 20_000
#: Bytes that are read at once.
INBOX_BYTES: Final = 256 * 1024

#: What `socket.getaddrinfo` gives: family, kind, protocol, name, address.
AddressInfo: TypeAlias = tuple[int, int, int, str, Any]


def by_turns(found: Iterable[AddressInfo]) -> list[AddressInfo]:
    """A host's addresses in the order to try them: IPv6 and IPv4 take turns (RFC 8305), for what is
    wrong with one of a family is mostly wrong with all of it."""
    families: defaultdict[int, list[AddressInfo]] = defaultdict(list)
    for one in found:
        families[one[0]].append(one)
    return [one for one in chain(*zip_longest(*families.values())) if one is not None]


def tune(sock: socket.socket) -> None:
    """Notice a peer that is gone, and send small requests at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


def make_inbox() -> memoryview:
    """Memory for links to read into, which stays. A block for every read would be cut from the end
    of the heap: what is allocated before it is freed stays behind it, and the heap creeps.

    It is mapped: only what replies have filled is resident, and a forked child has its own."""
    return memoryview(mmap.mmap(-1, INBOX_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
