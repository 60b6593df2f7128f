"""The mesh's own service as a target: tokens are counted one by one, and errors have their reasons."""

import grpc

from common.errors import NoWorkers
from common.rpc.errors import from_rpc
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.bench.clock import Clock
from services.bench.outcome import Outcome
from services.bench.target import QUESTION, picture
from services.bench.vocabulary import SAMPLE, Vocabulary
from services.bench.workload import Ask

_SETUP_SECONDS = 30.0


class GrpcTarget:
    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceStub,
        model: generation_pb2.Model,
        vocabulary: Vocabulary,
        *,
        timeout_seconds: float,
        ignore_eos: bool,
    ) -> None:
        self.model, self.context = model.id, model.max_context_tokens
        self._stub, self._vocabulary = stub, vocabulary
        self._timeout, self._ignore_eos = timeout_seconds, ignore_eos

    @classmethod
    async def find(
        cls, channel: grpc.aio.Channel, model: str, *, images: bool, timeout_seconds: float, ignore_eos: bool
    ) -> "GrpcTarget":
        """The model of this name, else the first (that takes images). Raises NoWorkers when there is none now."""
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        listed = (await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=_SETUP_SECONDS)).models
        found = [each for each in listed if (each.id == model if model else each.images or not images)]
        if not found:
            names = ", ".join(each.id for each in listed) or "none"
            raise NoWorkers(f"no model to send this load to; with workers there are: {names}")
        asked = generation_pb2.TokenizeRequest(model=found[0].id, text=SAMPLE, add_special_tokens=False)
        ids = (await stub.Tokenize(asked, timeout=_SETUP_SECONDS)).token_ids
        return cls(stub, found[0], Vocabulary(ids), timeout_seconds=timeout_seconds, ignore_eos=ignore_eos)

    def request(self, ask: Ask) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest(model=self.model)
        words = ask.words()
        if ask.image:
            message = request.chat.messages.add(role="user")
            message.content.add(image=generation_pb2.Image(data=picture(ask)))
            message.content.add(text=f"{QUESTION} {self._vocabulary.text(words)}")
        else:
            request.token_ids.ids.extend(self._vocabulary.ids(words))
        sampling = request.sampling
        sampling.max_tokens, sampling.temperature, sampling.ignore_eos = ask.output_tokens, 0.0, self._ignore_eos
        return request

    async def send(self, request: generation_pb2.GenerateRequest, outcome: Outcome, clock: Clock) -> None:
        try:
            async for message in self._stub.Generate(request, timeout=self._timeout):
                now = clock()
                if count := sum(len(choice.token_ids) for choice in message.choices):
                    outcome.arrivals.append(now)
                    outcome.output_tokens += count
                if message.HasField("usage"):
                    outcome.prompt_tokens = message.usage.prompt_tokens
                    outcome.cached_tokens = message.usage.cached_tokens
                    outcome.trace_id = message.accounting.trace_id
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
