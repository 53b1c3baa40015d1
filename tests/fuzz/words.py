"""What users write instead of bytes from a server: URLs, and the names of queues and jobs."""

import string

from chasqui.model import config
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys, check_job_id, check_job_name
from tests.fuzz.corpus import SECRET

_LETTERS = frozenset(string.ascii_letters + string.digits + "._:/-")
_KINDS = ("single", "sentinel", "cluster", "embedded")

# Which certificates there are is no matter of the URL, and reading them takes milliseconds.
config._tls_context = lambda files: None  # type: ignore[assignment,return-value]


class WrongWordError(Exception):
    """A word was taken that must not be, or its refusal tells a secret."""


def check_url(data: bytes) -> bool:
    """An endpoint that is whole, or a ValueError; the password is in no text."""
    url = data.decode(errors="surrogateescape")
    try:
        endpoint = Endpoint.parse(url)
    except ValueError as error:
        told, is_accepted = str(error), False
    else:
        told, is_accepted = f"{endpoint} {endpoint!r}", True
        _check_endpoint(endpoint)
    if SECRET in told and _has_secret(url):
        raise WrongWordError(f"{url!r}: {told}")
    return is_accepted


def _check_endpoint(endpoint: Endpoint) -> None:
    ports_are_fit = all(0 < port < 65_536 for _, port in endpoint.hosts)
    has_place = bool(endpoint.hosts) != bool(endpoint.path or endpoint.kind == "embedded")
    is_one = endpoint.kind != "single" or len(endpoint.hosts) <= 1
    if not (ports_are_fit and has_place and is_one and endpoint.db >= 0):
        raise WrongWordError(repr(endpoint))
    if endpoint.kind not in _KINDS or any(min(host) < "!" for host, _ in endpoint.hosts):
        raise WrongWordError(repr(endpoint))


def _has_secret(url: str) -> bool:
    """Whether the secret stands where a password does, and nowhere else."""
    place = url.partition("://")[2]
    for end in "/?#":
        place = place.partition(end)[0]
    return url.count(SECRET) == 1 and SECRET in place.rpartition("@")[0].partition(":")[2]


def check_name(data: bytes) -> bool:
    """Taken exactly by the rule; what is taken makes keys that are the queue's alone."""
    name = data.decode(errors="surrogateescape")
    is_queue = 0 < len(name) <= 200 and _LETTERS.issuperset(name)
    if _is_taken(Keys, name) != is_queue:
        raise WrongWordError(f"queue name {name!r}: must be {'taken' if is_queue else 'refused'}")
    is_text = not any("\ud800" <= char <= "\udfff" for char in name)
    is_name = is_text and len(name.encode()) <= 256
    if _is_taken(check_job_name, name) != is_name:
        raise WrongWordError(f"job name {name!r}: must be {'taken' if is_name else 'refused'}")
    is_id = is_name and bool(name.strip()) and not any(map(_is_bad_in_id, name))
    is_id = is_id and not name.startswith("~")  # these are steps of flows
    if _is_taken(check_job_id, name) != is_id:
        raise WrongWordError(f"job id {name!r}: must be {'taken' if is_id else 'refused'}")
    if is_queue:
        stream = Keys(name).stream
        if stream != b"{chasqui:%b}:stream" % data or stream.count(b"}") != 1:
            raise WrongWordError(f"queue name {name!r}: {stream!r}")
    return is_queue


def _is_bad_in_id(char: str) -> bool:
    return char in "{}\u2028\u2029" or ord(char) < 32 or 127 <= ord(char) < 160


def _is_taken(check: object, word: str) -> bool:
    try:
        check(word)  # type: ignore[operator]
    except ValueError:
        return False
    return True
