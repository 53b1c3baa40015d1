"""How the asyncio connection gets its links: where the server is now, and when to dial it."""

from time import monotonic

from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport import topology
from chasqui.transport.handshake import Handshake
from chasqui.transport.link import Link, in_thread, open_link
from chasqui.transport.recovery import LOOK_S, DialPacing, SharedDialPacing


class Dialler:
    """Dials the server that has one queue."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: bytes,
        handshake: Handshake,
        credential_provider: CredentialProvider | None,
        dial_pacing: SharedDialPacing,
    ) -> None:
        self._endpoint = endpoint
        self._key = key
        self._handshake = handshake
        self._credential_provider = credential_provider
        self._directory = topology.Directory(endpoint)
        self.pacing = DialPacing(endpoint, dial_pacing)

    @property
    def wait_s(self) -> float:
        """How long to wait before you ask again whether to dial; 0: dial now."""
        return min(self.pacing.wait_s(monotonic()), LOOK_S)

    async def dial(self) -> Link:
        """A link to the queue's server, wherever that is now."""
        self.pacing.dialling(monotonic())
        try:
            link = await self.open(await self._locate())
        except Exception as error:
            self.pacing.failed(error, monotonic())
            raise
        self.pacing.link_up(monotonic())
        return link

    async def open(self, endpoint: Endpoint) -> Link:
        """A link to this server."""
        return await open_link(endpoint, self._handshake, self._credential_provider)

    def close(self) -> None:
        """Let go of an embedded server. Blocks until it has ended."""
        self._directory.close()

    async def _locate(self) -> Endpoint:
        endpoint = self._endpoint
        if self.pacing.node is not None:
            return endpoint.at(*self.pacing.node)
        if endpoint.kind == "single":
            return endpoint
        if self._credential_provider is not None:
            endpoint = endpoint.with_credentials(await self._credential_provider(endpoint.host))
        return await in_thread(self._directory.locate, endpoint, self._key)
