"""Which images' embeddings are in the pool, and who needs them: room, pins, eviction. Pure: no I/O, no tensors."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from common.cache.keys import INDEX_KEY_BYTES
from common.cache.shares import Shares
from common.errors import NeverFits, Overloaded

Image = tuple[bytes, int]  # media key and rows: who counts other rows for a file gets an entry of its own, and an error


class State(Enum):
    ENCODING = "encoding"  # the encoder may write to the blocks
    READY = "ready"
    GONE = "gone"  # failed, dropped or evicted: the blocks are another's


@dataclass(slots=True, eq=False)
class Entry:
    """One image. Changed by its cache alone."""

    image: Image
    blocks: list[int]
    state: State = State.ENCODING
    pins: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """A call's images in order, each pinned as often as it is in the call. new: those to be encoded now."""

    entries: tuple[Entry, ...]
    new: tuple[Entry, ...]
    ready: int  # images that needed no encoding
    open: bool = True


class EmbeddingCache:
    """Blocks [0, num_blocks) of `block_rows` rows; an image takes whole blocks.

    Every block is in exactly one state: free, cached (of an entry that is ready and unpinned) or held (of one that is
    pinned or being encoded). Unpinned entries are evicted, the least recently used first; nothing else ever is.
    An entry belongs to the tenant it was made for, who may be bounded: see `reserve`.
    generations: uint64 [num_blocks], shared with readers; changes when a block gets a new owner, before it is written.
    """

    def __init__(self, num_blocks: int, block_rows: int, generations: np.ndarray) -> None:
        self.num_blocks, self.block_rows = num_blocks, block_rows
        self._generations = generations
        self._free = list(range(num_blocks - 1, -1, -1))
        self._entries: dict[Image, Entry] = {}
        self._unpinned: OrderedDict[Image, Entry] = OrderedDict()  # ready ones, the least recently used first
        self._shares: Shares[Image] = Shares()
        self._reservations: set[Reservation] = set()
        self._ready_keys: Counter[bytes] = Counter()
        self._changes: dict[bytes, bool] = {}  # key → stored or removed since the last events()
        self.cached = 0  # blocks

    # --- sizes ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.num_blocks - self.free - self.cached

    def encoding(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.state is State.ENCODING]

    def blocks(self, rows: int) -> int:
        return -(-rows // self.block_rows)

    def generation(self, block: int) -> int:
        return int(self._generations[block])

    # --- a call's images --------------------------------------------------------------------------------------------

    def has(self, image: Image) -> bool:
        """Ready, or being encoded."""
        return image in self._entries

    def reserve(
        self,
        images: Sequence[Image],
        *,
        retry_after_seconds: float = 0.1,
        tenant: bytes = b"",
        most: int | None = None,
    ) -> Reservation:
        """Pins what is there, takes room for what is not, all of it or nothing, and never waits (resource order).

        most: blocks that the tenant may keep from now on, pinned ones included; to stay within them its own unpinned
        images go first, so that it does not push out others'. None: no bound.
        Raises NeverFits for more than the whole pool, Overloaded with the hint when others hold too much of it.
        """
        wanted = dict.fromkeys(images)
        total = sum(self.blocks(rows) for _, rows in wanted)
        if total > self.num_blocks:
            raise NeverFits(
                f"the images have {sum(rows for _, rows in wanted)} rows, {total} blocks of {self.block_rows}; the "
                f"encode worker's pool has {self.num_blocks}",
                field="images",
            )
        missing = [image for image in wanted if image not in self._entries]
        need = sum(self.blocks(rows) for _, rows in missing)
        kept = sum(len(self._unpinned[image].blocks) for image in wanted if image in self._unpinned)
        if need > self.free + self.cached - kept:
            raise Overloaded(
                f"the encode worker has no room for {need} blocks of image rows now",
                retry_after_seconds=retry_after_seconds,
            )
        ready = sum(image in self._entries and self._entries[image].state is State.READY for image in images)
        for image in wanted:
            if image in self._unpinned:
                self.cached -= len(self._unpinned.pop(image).blocks)
                self._shares.unpark(image)
        if most is not None and missing:
            self._trim(tenant, most - need)
        while len(self._free) < need:
            self._evict(next(iter(self._unpinned)))
        new = tuple(self._add(image, tenant, most) for image in missing)
        entries = tuple(self._entries[image] for image in images)
        for entry in entries:
            entry.pins += 1
        reservation = Reservation(entries, new, ready)
        self._reservations.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> list[Entry]:
        """Unpins a call's images: ready ones stay cached. Returns those under way that nobody wants now. Idempotent."""
        if not reservation.open:
            return []
        reservation.open = False
        self._reservations.discard(reservation)
        unwanted = []
        for entry in reservation.entries:
            entry.pins -= 1
            if entry.pins == 0 and entry.state is State.ENCODING:
                unwanted.append(entry)
            elif entry.pins == 0 and entry.state is State.READY:
                self._park(entry)
        return unwanted

    # --- an image being encoded -------------------------------------------------------------------------------------

    def finish(self, entry: Entry) -> None:
        """Its rows are in its blocks."""
        entry.state = State.READY
        key = entry.image[0]
        self._ready_keys[key] += 1
        if self._ready_keys[key] == 1:
            self._change(key, stored=True)
        if not entry.pins:
            self._park(entry)

    def fail(self, entry: Entry) -> None:
        """It has no embedding, and nobody writes to its blocks any more: whoever has it pinned gets nothing."""
        self._forget(entry)

    # --- reports ----------------------------------------------------------------------------------------------------

    def events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) keys since the last call, cut to 16 bytes; a key is in at most one of them."""
        stored = [key[:INDEX_KEY_BYTES] for key, present in self._changes.items() if present]
        removed = [key[:INDEX_KEY_BYTES] for key, present in self._changes.items() if not present]
        self._changes.clear()
        return stored, removed

    def check_integrity(self) -> list[str]:
        """What is wrong; empty when free + cached + held == total and all counts agree."""
        errors: list[str] = []
        owned = [block for entry in self._entries.values() for block in entry.blocks]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            errors.append("a block has no owner, or several")
        pins = Counter(id(entry) for reservation in self._reservations for entry in reservation.entries)
        for image, entry in self._entries.items():
            unpinned = entry.state is State.READY and not entry.pins
            if entry.state is State.GONE or entry.image != image:
                errors.append("an entry that is gone is listed")
            if entry.pins != pins[id(entry)]:
                errors.append(f"an image has {entry.pins} pins, not {pins[id(entry)]}")
            if unpinned != (self._unpinned.get(image) is entry):
                errors.append("the eviction list disagrees with the pins")
            if len(entry.blocks) != self.blocks(image[1]):
                errors.append("an image has another number of blocks than its rows take")
        errors += self._shares.check_integrity(set(self._unpinned))
        cached = sum(len(entry.blocks) for entry in self._unpinned.values())
        if not self._unpinned.keys() <= self._entries.keys() or cached != self.cached:
            errors.append(f"{self.cached} cached blocks; counted {cached}")
        ready = Counter(image[0] for image, entry in self._entries.items() if entry.state is State.READY)
        if ready != +self._ready_keys:
            errors.append("the ready keys disagree with the entries")
        return errors

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add(self, image: Image, tenant: bytes, most: int | None) -> Entry:
        blocks = [self._free.pop() for _ in range(self.blocks(image[1]))]
        for block in blocks:
            self._generations[block] += 1
        self._shares.add(image, tenant, len(blocks), most)
        entry = self._entries[image] = Entry(image, blocks)
        return entry

    def _park(self, entry: Entry) -> None:
        self._unpinned[entry.image] = entry
        self.cached += len(entry.blocks)
        self._shares.park(entry.image)
        tenant = self._shares.tenant(entry.image)
        self._trim(tenant, self._shares.limits.get(tenant))

    def _trim(self, tenant: bytes, most: int | None) -> None:
        while (image := self._shares.excess(tenant, most)) is not None:
            self._evict(image)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.image]
        entry.state = State.GONE
        self._shares.remove(entry.image)
        self._free += entry.blocks

    def _evict(self, image: Image) -> None:
        entry = self._unpinned.pop(image)
        self.cached -= len(entry.blocks)
        self._forget(entry)
        self._ready_keys[image[0]] -= 1
        if not self._ready_keys[image[0]]:
            del self._ready_keys[image[0]]
            self._change(image[0], stored=False)

    def _change(self, key: bytes, *, stored: bool) -> None:
        # Stored and removed between two events cancel out: the outside never saw the first of them.
        if self._changes.pop(key, stored) == stored:
            self._changes[key] = stored
