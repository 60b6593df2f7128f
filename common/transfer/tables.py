"""All that one worker has on offer: KV of prompts, embeddings of images, or both."""

from common.errors import TransferFailed
from common.policies.handoff.terms import HandoffLimits
from common.transfer.key import Identity, TransferKey
from common.transfer.publications import PublicationTable


class PublicationTables:
    """A table for each of a worker's pools; a transfer's part says which one it is of. At least one is there."""

    def __init__(self, kv: PublicationTable | None = None, embeddings: PublicationTable | None = None) -> None:
        self.kv, self.embeddings = kv, embeddings
        self._all = [table for table in (kv, embeddings) if table is not None]

    @property
    def identity(self) -> Identity:
        return self._all[0].identity

    @property
    def limits(self) -> HandoffLimits:
        return self._all[0].limits

    def of(self, key: TransferKey) -> PublicationTable:
        """Raises TransferFailed when this worker has no such pool."""
        table = self.embeddings if key.part else self.kv
        if table is None:
            raise TransferFailed(f"this worker publishes no {'embeddings' if key.part else 'KV'}")
        return table

    @property
    def open_publications(self) -> int:
        return sum(table.open_publications for table in self._all)

    async def idle(self) -> None:
        """Returns when every publication has ended."""
        while self.open_publications:
            for table in self._all:
                await table.idle()

    def shut_down(self) -> None:
        for table in self._all:
            table.shut_down()
