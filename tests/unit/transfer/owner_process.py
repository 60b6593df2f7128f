"""An owner in a process of its own, to be killed: two of five blocks are readable, the rest never comes."""

import asyncio
import sys
from pathlib import Path

from common.transfer.key import Identity, TransferKey
from tests.unit.transfer.mesh import BLOCKS, Mesh

KEY = TransferKey(b"k" * 16, 0, 1)
IDENTITY = Identity("prefill-k", "k1")


async def main(run_dir: str) -> None:
    owner = await Mesh(Path(run_dir)).owner(name=IDENTITY.worker_id, life=IDENTITY.incarnation)
    publication = owner.publish(KEY)
    owner.engine.fill(BLOCKS)
    owner.start_computing(publication)
    publication.chunk(1, 0, 40, last=False)
    await owner.engine.reach(1)
    print(owner.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
