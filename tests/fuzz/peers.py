"""A gateway whose worker's answers are wrong: loads, blocks, tokens, ends."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import msgspec

from common.cache.keys import KvLayout
from common.registry.record import WorkerRecord
from epd.v1 import decode_pb2, generation_pb2, prefill_pb2, types_pb2, worker_pb2
from services.gateway.main import Gateway
from services.gateway.settings import GatewaySettings
from tests.fuzz import messages
from tests.fuzz.calls import call, open_channel
from tests.fuzz.oracle import Fault, Logged, check_rpc
from tests.fuzz.surface import Surface
from tests.tokenizer_files import byte_tokenizer

MODEL = "evil"
LAYOUT = KvLayout(model=MODEL, revision="r", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=16)
TOKENS = 4
# Of a worker that says it has finished and has not, again and again.
_NO_END = ((grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),)


def _choice(*ids: int, end: bool = False) -> types_pb2.ChoiceTokens:
    reason = types_pb2.FINISH_REASON_LENGTH if end else types_pb2.FINISH_REASON_UNSPECIFIED
    return types_pb2.ChoiceTokens(choice=0, token_ids=ids, finish_reason=reason)


class Impostor(grpc.GenericRpcHandler):
    """A worker with both roles that answers every call rightly, but for what `rng` spoils. None: spoils nothing."""

    def __init__(self) -> None:
        self.rng: Random | None = None
        self.address = ""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if (answers := self._right().get(name)) is None:
            return None

        async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
            for message in answers:
                yield self._spoilt(message)
            if name == "Watch":
                await asyncio.Event().wait()

        return grpc.unary_stream_rpc_method_handler(answer)

    def _spoilt(self, message: Any) -> bytes:
        rng = self.rng
        if rng is None or rng.random() < 0.6:
            return bytes(message.SerializeToString())
        return messages.mutated(rng, message, 2)

    def _right(self) -> dict[str, list[Any]]:
        prefill, decode, watch = prefill_pb2.PrefillResponse, decode_pb2.DecodeResponse, worker_pb2.WatchResponse
        accepted = decode_pb2.DecodeAccepted()
        steps = [decode_pb2.DecodeTokens(choices=[_choice(97 + i, end=i == TOKENS - 1)]) for i in range(TOKENS)]
        return {
            "Watch": [
                watch(blocks=worker_pb2.BlockEvents(snapshot_start=True, snapshot_end=True, stored=[bytes(16)])),
                watch(load=worker_pb2.Load(total_blocks=64, free_blocks=64)),
            ],
            "Prefill": [
                prefill(accepted=prefill_pb2.PrefillAccepted()),
                prefill(started=prefill_pb2.PrefillStarted(cached_tokens=0)),
                prefill(finished=prefill_pb2.PrefillFinished(first=[_choice(97)])),
            ],
            "Decode": [
                decode(accepted=accepted),
                *(decode(tokens=step) for step in steps),
                decode(finished=decode_pb2.DecodeFinished(hops=[types_pb2.HopTiming(name="decode.steps")])),
            ],
        }


class Peers(Surface):
    """One request at a time, so that each meets the faults of its own numbers."""

    name = "workers' answers"
    at_once = 1

    def __init__(self, directory: Path) -> None:
        self._impostor = Impostor()
        self._logged = Logged("services.gateway.worker", "services.gateway.token_stream")  # they blame the peer
        fast: dict[str, Any] = {
            "first_byte_seconds": 0.5,
            "stall_seconds": 0.5,
            "route_wait_seconds": 2.0,
            "recovery_seconds": 1.0,
            "default_timeout_seconds": 5.0,
            "max_attempts": 2,
        }
        self._gateway = Gateway(
            GatewaySettings(
                models={MODEL: str(byte_tokenizer(directory))},
                grpc_bind="127.0.0.1:0",
                http_bind="127.0.0.1:0",
                etcd=None,
                **fast,
            )
        )

    async def start(self) -> None:
        logging.root.addHandler(self._logged)
        await self._impostor.start()
        await self._gateway.start()
        self._channel = open_channel(self._gateway.grpc_address)
        self._record = WorkerRecord(
            worker_id="impostor",
            incarnation="0",
            roles=("prefill", "decode"),
            address=self._impostor.address,
            model=MODEL,
            layout=LAYOUT,
            max_context=256,
            vocab_size=300,
            num_blocks=64,
            executor="timed",
        )
        await self._anew(None)

    async def close(self) -> None:
        logging.root.removeHandler(self._logged)
        await self._channel.close()
        await self._gateway.stop()
        await self._impostor.stop()

    async def _anew(self, rng: Random | None) -> None:
        """The worker in a new life, of which the gateway knows nothing wrong yet."""
        self._impostor.rng = None
        self._record = msgspec.structs.replace(self._record, incarnation=str(int(self._record.incarnation) + 1))
        fleet = self._gateway.fleet
        fleet.update({self._record.worker_id: self._record})
        async with asyncio.timeout(10):
            while not all(worker.routable for worker in fleet.all()):
                await fleet.changed()
        self._impostor.rng = rng

    async def one(self, rng: Random) -> str:
        await self._anew(rng)
        outcome = await self._ask()
        check_rpc(outcome.code, outcome.reason, outcome.details, _NO_END)
        return outcome.label

    async def _ask(self) -> Any:
        asked = generation_pb2.GenerateRequest(model=MODEL, text="hello")
        asked.sampling.max_tokens, asked.sampling.temperature = TOKENS, 0.0
        return await call(self._channel, "/epd.v1.GenerationService/Generate", [asked.SerializeToString()])

    async def alive(self) -> None:
        self._logged.check()
        await self._anew(None)
        outcome = await self._ask()
        answers = [generation_pb2.GenerateResponse.FromString(each) for each in outcome.answers]
        text = "".join(delta.text for answer in answers for delta in answer.choices)
        if text != "abcd":
            raise Fault(f"after wrong answers right ones make {json.dumps(text)}: {outcome.label}")
        if left := self._gateway.telemetry.open_span_names():
            raise Fault(f"open spans: {left}")
