"""How the blocking connection gets its links: where the server is now, and when to dial it."""

import asyncio
import inspect
import time

from chasqui.errors import UnreachableError
from chasqui.model.config import AnyCredentialProvider, Credentials, Endpoint
from chasqui.transport import topology
from chasqui.transport.blocking_link import BlockingLink, is_loss, open_link
from chasqui.transport.handshake import Handshake
from chasqui.transport.recovery import DialPacing, SharedDialPacing
from chasqui.transport.sockets import CONNECT_TIMEOUT_S, make_inbox


class BlockingDialler:
    """Dials the server that has one queue, for one process."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: bytes,
        handshake: Handshake,
        credential_provider: AnyCredentialProvider | None,
        dial_pacing: SharedDialPacing,
    ) -> None:
        self._endpoint = endpoint
        self._key = key
        self._handshake = handshake
        self._credential_provider = credential_provider
        self._directory = topology.Directory(endpoint)
        self._inbox: memoryview | None = None
        self.pacing = DialPacing(endpoint, dial_pacing)

    def dial(self, deadline_s: float) -> BlockingLink:
        """A link to the queue's server, wherever that is now."""
        self.pacing.dialling(time.monotonic())
        try:
            link = self.open(self._locate(), deadline_s)
        except Exception as error:
            if not isinstance(error, OSError) or is_loss(error):
                self.pacing.failed(error, time.monotonic())
            raise
        self.pacing.link_up(time.monotonic())
        return link

    def open(self, endpoint: Endpoint, deadline_s: float) -> BlockingLink:
        """A link to this server. All links share the memory that they read into: no two of them
        are ever in use at the same time."""
        if self._inbox is None:
            self._inbox = make_inbox()
        endpoint = self._with_credentials(endpoint)
        deadline_s = min(deadline_s, time.monotonic() + CONNECT_TIMEOUT_S)
        return open_link(endpoint, self._handshake, deadline_s, self._inbox)

    def close(self) -> None:
        """Let go of an embedded server. Blocks until it has ended."""
        self._directory.close()

    def _locate(self) -> Endpoint:
        endpoint = self._endpoint
        if self.pacing.node is not None:
            return endpoint.at(*self.pacing.node)
        if endpoint.kind == "single":
            return endpoint
        return self._directory.locate(self._with_credentials(endpoint), self._key)

    def _with_credentials(self, endpoint: Endpoint) -> Endpoint:
        if self._credential_provider is None:
            return endpoint
        try:
            given = _ask_provider(self._credential_provider, endpoint.host)
        except OSError as error:
            if is_loss(error):
                raise
            raise UnreachableError(f"no credentials for {endpoint}: {error}") from error
        return endpoint.with_credentials(given)


def _ask_provider(provider: AnyCredentialProvider, host: str | None) -> Credentials:
    given = provider(host)
    if not inspect.isawaitable(given):
        return given

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        if inspect.iscoroutine(given):
            given.close()
        raise RuntimeError(
            "credential_provider is async, and this thread already runs an event loop: "
            "give the blocking connection a plain function"
        )

    async def wait() -> Credentials:
        return await given

    # Not asyncio.run: that would replace the thread's current event loop.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(wait())
    finally:
        loop.close()
