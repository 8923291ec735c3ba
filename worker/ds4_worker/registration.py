"""The lease of a worker over its whole life: owners die and come back while it serves.

Owns: noticing that the owner is gone, finding the next one at the same manifest, and judging it.
The same owner id means the same memory (the owner re-executed itself or was revived from the
service manager's store): the lease is renewed. Another id means other memory: this worker goes on
with what it has mapped, says so, and must be restarted to let go of it. Nothing here stops serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ds4_common import client
from ds4_common.client import OwnerConnection
from ds4_common.errors import Ds4Error

_RETRY_SECONDS = 1.0


class Registration:
    """Watches one connection in the event loop. `state` is what /health says: alive, gone, or
    replaced, and `detail` why."""

    def __init__(
        self,
        connection: OwnerConnection,
        name: str,
        loop: asyncio.AbstractEventLoop,
        log: Callable[[str], None],
    ) -> None:
        self.state = "alive"
        self.detail = ""
        self._connection = connection
        self._name = name
        self._loop = loop
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def start(self, *, renew: bool = False) -> None:
        """`renew`: take a lease of a serving worker in the place of the one there is."""
        if renew:
            self._task = self._loop.create_task(self._find())
        else:
            self._loop.add_reader(self._connection.fileno(), self._spoke)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _spoke(self) -> None:
        if self._connection.owner_alive():
            return
        self._loop.remove_reader(self._connection.fileno())
        self._set("gone", "the owner is gone; serving on from memory that is mapped already")
        self._task = self._loop.create_task(self._find())

    async def _find(self) -> None:
        """Until the owner of our memory has us in its books again."""
        while not await self._register():
            await asyncio.sleep(_RETRY_SECONDS)

    async def _register(self) -> bool:
        try:
            found = await asyncio.to_thread(
                client.connect, self._connection.manifest_path, "worker", self._name, None
            )
        except Ds4Error as error:
            if self.state == "alive":  # renewing: the old lease is good enough
                self._log(f"cannot renew the lease: {error}")
                self._loop.add_reader(self._connection.fileno(), self._spoke)
                return True
            return False
        if found.welcome.owner_id != self._connection.welcome.owner_id:
            pid = found.owner_pid
            found.close()
            self._set(
                "replaced",
                f"another owner, pid {pid}, has other weights; this worker goes on with those it "
                "has mapped: restart it",
            )
            return False
        self._connection.close()
        self._connection = found
        if self.state != "alive":
            self._set("alive", "")
            self._log(f"registered with the owner again, pid {found.owner_pid}")
        self._loop.add_reader(found.fileno(), self._spoke)
        return True

    def _set(self, state: str, detail: str) -> None:
        if state != self.state and detail:
            self._log(detail)
        self.state, self.detail = state, detail
