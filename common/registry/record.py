"""What a worker says of itself in the registry: membership only, load and blocks go by WorkerService.Watch."""

import msgspec

from common.cache.keys import KvLayout

PROTOCOL_VERSION = 1
MAX_RECORD_BYTES = 64 * 1024


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of one worker, stored as JSON under /epd/workers/<worker_id> with the worker's lease."""

    protocol_version: int = PROTOCOL_VERSION
    worker_id: str
    incarnation: str
    roles: tuple[str, ...]  # "prefill", "decode"
    address: str  # host:port that gateways and other workers can reach
    model: str  # the name it is served under
    layout: KvLayout
    max_context: int  # tokens, prompt and output together
    vocab_size: int
    num_blocks: int
    executor: str
    draining: bool = False

    @property
    def compat_id(self) -> str:
        return self.layout.compat_id
