"""How the asyncio connection gets its links: where the server is now, and when to dial it."""

import logging
from time import monotonic

from chasqui import topology
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport.link import Link, in_thread, open_link
from chasqui.transport.recovery import LOOK_S, Introduction, Redial, Search

logger = logging.getLogger(__name__)


class Dialler:
    """Dials the server that has one queue."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: bytes,
        introduction: Introduction,
        credential_provider: CredentialProvider | None,
        search: Search,
    ) -> None:
        self._endpoint = endpoint
        self._key = key
        self._introduction = introduction
        self._credential_provider = credential_provider
        self._directory = topology.Directory(endpoint)
        self._redial = Redial(search)
        #: The node that the last MOVED named.
        self.node: tuple[str, int] | None = None
        self.was_connected = False

    @property
    def wait_s(self) -> float:
        """How long to wait before asking again whether to dial; 0: dial now."""
        return min(self._redial.wait_s(monotonic()), LOOK_S)

    async def dial(self) -> Link:
        """A link to the queue's server, wherever that is now."""
        self._redial.dialling(monotonic())
        try:
            link = await self.open(await self._locate())
        except Exception as error:
            fields = {"server": str(self._endpoint)}
            logger.debug("no connection to %s: %s", self._endpoint, error, extra=fields)
            self.node = None
            if self.was_connected:
                self.missed(error)
            raise
        self.was_connected = True
        self._redial.link_up(monotonic())
        return link

    async def open(self, endpoint: Endpoint) -> Link:
        """A link to this server."""
        return await open_link(endpoint, self._introduction, self._credential_provider)

    def missed(self, error: Exception) -> None:
        """A server that was there cannot be reached, or breaks the protocol."""
        self._redial.missed(self._endpoint, error, monotonic())

    def link_down(self) -> None:
        """The link of the last dial is gone, or no longer wanted."""
        self._redial.link_down(monotonic())

    def close(self) -> None:
        """Let go of an embedded server. Blocks until it has ended."""
        self._directory.close()

    async def _locate(self) -> Endpoint:
        endpoint = self._endpoint
        if self.node is not None:
            return endpoint.at(*self.node)
        if endpoint.kind == "single":
            return endpoint
        if self._credential_provider is not None:
            endpoint = endpoint.with_credentials(await self._credential_provider(endpoint.host))
        return await in_thread(self._directory.locate, endpoint, self._key)
