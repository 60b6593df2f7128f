"""Who moves what: the names of one transfer and of its two ends."""

import msgspec


class TransferKey(msgspec.Struct, frozen=True, order=True):
    """One try of one leg of one request; every message of a transfer carries it.

    request_id: 16 random bytes of the gateway's. leg: 0 for all choices of a request. attempt: from 1, grows by one.
    part: 0 for the KV cache, from 1 for the embeddings of each encode call of the attempt.
    """

    request_id: bytes
    leg: int
    attempt: int
    part: int = 0

    @property
    def line(self) -> tuple[bytes, int, int]:
        """What the attempts of one part of one leg have in common."""
        return (self.request_id, self.leg, self.part)

    def of_attempt(self, attempt: int) -> "TransferKey":
        """The same part of the same leg in another attempt."""
        return TransferKey(self.request_id, self.leg, attempt, self.part)

    @property
    def seq(self) -> str:
        """The engine's name of the sequence, the same at both ends."""
        name = f"{self.request_id.hex()}.{self.leg}.{self.attempt}"
        return f"{name}.{self.part}" if self.part else name

    def __str__(self) -> str:
        return self.seq


class Identity(msgspec.Struct, frozen=True):
    """One life of one worker: the incarnation is new at each start."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"
