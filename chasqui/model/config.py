"""Settings, checked when they are made: one that exists is valid."""

import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from chasqui.model.keys import shown

DEFAULT_URL: Final = "redis://127.0.0.1:6379"
#: The longest time that an option may name, ten years: the server and Python's timers accept it.
MAX_MS: Final = 10 * 365 * 86_400_000
#: The most that the server counts to.
MAX_COUNT: Final = 2**63 - 1

#: Username and password; None where there is none.
Credentials: TypeAlias = tuple[str | None, str | None]
#: Asked before every AUTH, on reconnects too; gets the host, gives the credentials.
CredentialProvider: TypeAlias = Callable[[str | None], Awaitable[Credentials]]
#: What a blocking connection takes: an async provider, or a plain function.
AnyCredentialProvider: TypeAlias = Callable[[str | None], Awaitable[Credentials] | Credentials]


def check_int(
    name: str, value: object, low: int, high: int = MAX_COUNT, *, takes_none: bool = True
) -> None:
    """Raise unless an option is an int from `low` to `high`. Most also take None, which stands for
    their default."""
    if value is None and takes_none:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {shown(value)}")


def check_flag(what: str, value: object) -> None:
    """Raise TypeError unless a flag is a bool: a slip must not delete anything."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be a bool, got {type(value).__name__}")


def check_limit(limit: object) -> int:
    """How many to list or move at most, if it is a valid number of them."""
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, got {type(limit).__name__}")
    if limit < 0:
        raise ValueError(f"limit must be non-negative, got {shown(limit)}")
    return min(limit, MAX_COUNT)


def check_credential_provider(provider: object) -> None:
    """Raise TypeError for a provider that cannot be called."""
    if provider is not None and not callable(provider):
        raise TypeError(
            f"credential_provider must be a function or None, got {type(provider).__name__}"
        )


_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "embedded")
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")


class Secret:
    """A password that no repr, log or traceback shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Secret('***')"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and how to get in. `repr` and `str` never hold a password."""

    kind: str  # single, sentinel, cluster, embedded
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None  # of a unix socket, or the directory of an embedded server
    username: str | None = None
    password: Secret | None = field(default=None, repr=False)
    db: int = 0
    service: str | None = None  # what Sentinel calls the primary
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    tls_files: dict[str, str] = field(default_factory=dict, compare=False)
    sentinel_username: str | None = None  # who we are to the sentinels themselves
    sentinel_password: Secret | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls, url: str | None = None, *, tls: bool = False, tls_context: ssl.SSLContext | None = None
    ) -> "Endpoint":
        """The endpoint of a URL; None takes CHASQUI_URL, REDIS_URL or the local default."""
        if url is None:
            url = os.environ.get("CHASQUI_URL") or os.environ.get("REDIS_URL") or DEFAULT_URL
        if not isinstance(url, str):
            raise TypeError(f"redis_url must be a str, got {type(url).__name__}")
        if not isinstance(tls, bool):
            raise TypeError(f"tls must be a bool, got {type(tls).__name__}")
        if any(ord(char) < 33 or ord(char) == 127 for char in url):
            raise ValueError("redis_url must hold no spaces or control characters")
        scheme = url.partition("://")[0].lower() if "://" in url else ""
        if scheme not in _SCHEMES:
            raise ValueError(
                f"redis_url must start with one of {', '.join(s + '://' for s in _SCHEMES)}"
                + (f", not {scheme}://" if scheme else "")
            )
        if scheme == "embedded":
            return cls("embedded", path=_parse_embedded(url))
        return _parse_network(url, scheme, tls, tls_context)

    def __str__(self) -> str:
        """For logs and errors: never with credentials."""
        if self.kind == "embedded":
            return f"embedded://{self.path or ''}"
        if self.path is not None:
            return f"unix://{self.path}"
        where = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return where if self.service is None else f"{where} (service {self.service})"

    def at(self, host: str, port: int) -> "Endpoint":
        """The same settings for one particular node."""
        single = replace(self, kind="single", hosts=((host, port),), service=None)
        return replace(single, sentinel_username=None, sentinel_password=None)

    def with_credentials(self, given: object) -> "Endpoint":
        """The same server, with the credentials that a credential_provider gave."""
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(
                "credential_provider must give a pair, (username, password), "
                f"got {type(given).__name__}"
            )
        for one in given:
            if one is not None and not isinstance(one, str):
                raise TypeError(
                    "credential_provider must give a username and a password that are str or None, "
                    f"got {type(one).__name__}"
                )
        username, password = given
        secret = None if password is None else Secret(password)
        return replace(self, username=username, password=secret)

    @property
    def host(self) -> str | None:
        """The first host; None for a unix socket."""
        return self.hosts[0][0] if self.hosts else None


def _parse_embedded(url: str) -> str | None:
    """The server's directory; None for a temporary one."""
    parts = _split(url)
    path = unquote(parts.path)
    is_rooted = path.startswith("/") and path.strip("/") and not parts.netloc
    if parts.query or parts.fragment or not (is_rooted or url.endswith("://")):
        raise ValueError(
            "redis_url names no embedded server: write embedded:// for a temporary one, "
            "or embedded:///some/dir for one that keeps its data there"
        )
    return path or None


def _parse_network(
    url: str, scheme: str, tls: bool, tls_context: ssl.SSLContext | None
) -> Endpoint:
    parts = _split(url)
    if "@" in parts.query or "@" in parts.fragment:
        # Errors below quote what stands behind the host; here that is the rest of a password.
        raise ValueError(
            "redis_url has an @ behind its host: in a password / is %2F, ? is %3F and # is %23"
        )
    if parts.fragment and "sentinel_password=" in parts.query:
        raise ValueError("redis_url has a # behind its host: in a password # is %23")
    options = _options(parts.query)
    user, _, place = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    kind = scheme.removeprefix("redis+") if "+" in scheme else "single"
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    service = path = None
    hosts: tuple[tuple[str, int], ...] = ()
    if scheme == "unix":
        path, segments = unquote(parts.path), []
        if place or not path.strip("/"):
            raise ValueError("redis_url needs the path of a socket: unix:///path/to/socket")
    else:
        hosts = _hosts(place, kind)
    if kind == "sentinel":
        service = segments.pop(0) if segments else "mymaster"
    db = _db(segments, options, kind)
    login = _sentinel_login(options, kind)
    wants_tls = scheme == "rediss" or tls or tls_context is not None
    if options and not wants_tls:
        raise ValueError("redis_url names TLS files but is not rediss://")
    if tls_context is not None and kind != "single":
        # redis-py, which finds the nodes, takes files only.
        raise ValueError("tls_context is for a single server: name the TLS files in redis_url")
    return Endpoint(
        kind,
        hosts,
        path,
        unquote(username) or None,
        Secret(unquote(password)) if password else None,
        db,
        service,
        (tls_context or _tls_context(options)) if wants_tls else None,
        options,
        login.get("sentinel_username"),
        Secret(login["sentinel_password"]) if "sentinel_password" in login else None,
    )


def _options(query: str) -> dict[str, str]:
    """The options behind the ? of a URL. A + is a +, as in the rest of the URL. A name without a
    value is kept if there is a password: it may be the rest of that behind a bare &."""
    has_secret = "sentinel_password=" in query
    given = parse_qs(query.replace("+", "%2B"), keep_blank_values=has_secret)
    return {name: values[-1] for name, values in given.items()}


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        # Its own message may quote the part with the password.
        raise ValueError("redis_url is not a URL that can be read") from None


def _sentinel_login(options: dict[str, str], kind: str) -> dict[str, str]:
    """Take username and password for the sentinels out of the options; only TLS files may stay."""
    login = {name: options.pop(name) for name in _SENTINEL_LOGIN if name in options}
    if login and kind != "sentinel":
        raise ValueError(f"redis_url has {next(iter(login))}: that is for redis+sentinel://")
    if unknown := [name for name in options if name not in _TLS_FILES]:
        # Behind a password it may be the rest of that.
        told = f": {unknown[0]!r}" if "sentinel_password" not in login else ", or a bare & in one"
        raise ValueError(
            f"redis_url has an option that is not taken there{told}"
            f" (allowed: db, {', '.join((*_TLS_FILES, *_SENTINEL_LOGIN))})"
        )
    return login


def _hosts(place: str, kind: str) -> tuple[tuple[str, int], ...]:
    default_port = 26379 if kind == "sentinel" else 6379
    hosts = []
    for one in place.split(",") if place else ["127.0.0.1"]:
        host, port = one, ""
        if one.startswith("["):
            host, _, rest = one[1:].partition("]")
            port = rest.removeprefix(":")
        elif ":" in one:
            host, _, port = one.rpartition(":")
            if ":" in host:
                raise ValueError("redis_url has a host with a colon: an IPv6 address needs [ and ]")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError("redis_url has a port that is not a number from 1 to 65535")
        try:
            host.encode("idna")  # as the resolver will
        except UnicodeError:
            raise ValueError(
                "redis_url has a host that is no name: a part is empty or too long"
            ) from None
        hosts.append((host or "127.0.0.1", int(port) if port else default_port))
    if kind == "single" and len(hosts) > 1:
        raise ValueError(
            "redis_url names several hosts: that is for redis+sentinel:// and redis+cluster://"
        )
    return tuple(hosts)


def _db(segments: list[str], options: dict[str, str], kind: str) -> int:
    """The database, from the path or the options."""
    if len(segments) > 1:
        raise ValueError("redis_url has more behind its host than a database number")
    if segments and "db" in options:
        raise ValueError("redis_url names two databases")
    text = segments[0] if segments else options.pop("db", "0")
    if not (text.isascii() and text.isdigit()):
        raise ValueError("redis_url has a database that is not a number")
    if kind == "cluster" and int(text):
        raise ValueError("redis_url names a database, and a cluster has only database 0")
    return int(text)


def _tls_context(files: dict[str, str]) -> ssl.SSLContext:
    """A context that always checks chain and host name; to check less, pass your own context."""
    authorities, certificate = files.get("ssl_ca_certs"), files.get("ssl_certfile")
    if "ssl_keyfile" in files and certificate is None:
        raise ValueError("redis_url has ssl_keyfile without ssl_certfile")
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ValueError(f"ssl_ca_certs in redis_url cannot be used: {_why(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, files.get("ssl_keyfile"), _no_password)
        except OSError as error:
            names = "ssl_certfile and ssl_keyfile" if "ssl_keyfile" in files else "ssl_certfile"
            raise ValueError(f"{names} in redis_url cannot be used: {_why(error)}") from None
    return context


def _no_password() -> str:
    """Called for an encrypted key; without this, OpenSSL would ask at the terminal."""
    raise ValueError("ssl_keyfile in redis_url must not be encrypted: there is no password for it")


def _why(error: OSError) -> str:
    """What is wrong with a TLS file. The caller names it: OpenSSL does not."""
    return error.strerror or str(error)
