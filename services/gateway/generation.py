"""The life of one request in the gateway, from what the client sent to the message with its usage and timings."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from common import telemetry
from common.errors import Cancelled, DeadlineExceeded, EpdError
from common.rpc import deadline
from common.telemetry import Telemetry
from epd.v1 import generation_pb2, types_pb2
from services.gateway import accounting
from services.gateway.accounting import Account, TimeLine
from services.gateway.admission import Admission
from services.gateway.choice import Choice
from services.gateway.observe import Observer
from services.gateway.orchestrator import Orchestrator
from services.gateway.outbox import Outbox
from services.gateway.preprocess import MAX_LABEL, Prepared, Preprocessor
from services.gateway.quota.quota import Quota
from services.gateway.settings import GatewaySettings


class Generator:
    """Runs requests: admit, preprocess, then plan and attempt until every choice has ended."""

    def __init__(
        self,
        admission: Admission,
        preprocessor: Preprocessor,
        orchestrator: Orchestrator,
        settings: GatewaySettings,
        tel: Telemetry,
        quota: Quota,
    ) -> None:
        self.quota = quota
        self.admission = admission
        self.preprocessor = preprocessor
        self.orchestrator = orchestrator
        self.settings = settings
        self.telemetry = tel
        self.observer = Observer(tel.metrics, settings.max_tenants)

    def generate(
        self, request: generation_pb2.GenerateRequest, *, tenant: str, timeout_seconds: float | None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Answers, the last with usage and accounting. Raises EpdError. Closing it cancels the work everywhere.

        The caller's current trace context is the parent's.
        """
        longest = self.settings.default_timeout_seconds
        timeout = longest if timeout_seconds is None else min(timeout_seconds, longest)
        return _Life(self, request, tenant, timeout).responses()


class _Life:
    """One request. Its task holds the root span; whoever reads `responses` may do so from any other task."""

    def __init__(
        self, mesh: Generator, request: generation_pb2.GenerateRequest, tenant: str, timeout_seconds: float
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._tenant = tenant
        self._timeout = timeout_seconds
        # One that is too long is refused, and must not be in a span before that.
        given = request.request_id if len(request.request_id) <= MAX_LABEL else ""
        self._label = given or f"req-{secrets.token_hex(12)}"
        self._loop = asyncio.get_running_loop()
        self._line = TimeLine(received=self._loop.time())
        self._outbox: asyncio.Future[Outbox] = self._loop.create_future()
        self._choices: list[Choice] = []
        self._prepared: Prepared | None = None
        self._trace_id = ""
        self._final: generation_pb2.GenerateResponse | None = None

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        task = asyncio.create_task(self._run(), name="generation")
        try:
            await asyncio.wait((self._outbox, task), return_when=asyncio.FIRST_COMPLETED)
            if self._outbox.done():
                outbox = self._outbox.result()
                while (deltas := await outbox.take()) is not None:
                    prompt = self._prompt() if not self._line.first_sent else None
                    yield generation_pb2.GenerateResponse(
                        request_id=self._label, model=self._name, choices=deltas, prompt=prompt
                    )
                    if not self._line.first_sent:
                        self._line.first_sent = self._loop.time()  # the client's transport has taken it
            try:
                await task  # raises what it ended with
            except asyncio.CancelledError:
                if (reader := asyncio.current_task()) is None or reader.cancelling():
                    raise
                raise Cancelled("a call made for this request was cancelled") from None
            yield self._last_message()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _model(self) -> str:
        """For metrics: never a name that only a client has made up."""
        return self._prepared.model if self._prepared else "unknown"

    @property
    def _name(self) -> str:
        """For the client."""
        return self._prepared.name if self._prepared else ""

    async def _run(self) -> None:
        mesh, observer = self._mesh, self._mesh.observer
        error: BaseException | None = None
        attributes = {
            telemetry.REQUEST_ID: self._label,
            telemetry.TENANT: self._tenant,
            telemetry.GEN_AI_OPERATION: "generate",
        }
        try:
            with mesh.telemetry.start_span(
                telemetry.GATEWAY_GENERATE, kind=SpanKind.SERVER, attributes=attributes
            ) as span:
                self._trace_id = trace.format_trace_id(span.get_span_context().trace_id)
                deadline.set_remaining(self._timeout)
                try:
                    async with asyncio.timeout(self._timeout):
                        await self._live(span)
                except TimeoutError:
                    raise DeadlineExceeded("the request's time is over") from None
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._outbox.done():
                self._outbox.result().close()
            observer.ended(self._model, self._tenant, error, self._loop.time() - self._line.received)

    async def _live(self, span: Span) -> None:
        mesh, line = self._mesh, self._line
        with contextlib.ExitStack() as stack:
            with telemetry.start_span(telemetry.GATEWAY_ADMIT):
                stack.enter_context(mesh.admission.admit(self._tenant, self._label, self._request.ByteSize()))
                use = stack.enter_context(mesh.quota.use(self._tenant))
                await use.admit(self._request.priority)
            line.admitted = self._loop.time()
            with telemetry.start_span(telemetry.GATEWAY_PREPROCESS):
                prepared = self._prepared = await mesh.preprocessor.prepare(self._request, self._tenant)
                await use.prompt(len(prepared.prompt), sum(item.pixels for item in prepared.media))
            line.prepared = self._loop.time()
            _describe(span, prepared)
            self._choices = [
                Choice(
                    index,
                    prepared.tokenizer,
                    prepared.sampling,
                    prepared.stops,
                    skip_special_tokens=prepared.skip_special_tokens,
                    include_stop=prepared.include_stop,
                    mute=prepared.prompt_only,
                    tools=prepared.tools,
                )
                for index in range(prepared.n)
            ]
            outbox = Outbox(self._choices, interval=prepared.stream_interval, bound=mesh.settings.buffered_tokens)
            self._outbox.set_result(outbox)
            stack.enter_context(mesh.observer.in_flight(prepared.model))
            await mesh.orchestrator.run(prepared, self._choices, outbox)
            outbox.close()
            await outbox.drained()
            self._settle(span, prepared)

    def _settle(self, span: Span, prepared: Prepared) -> None:
        """Usage, time and verdict, once the client has everything else."""
        tokens = [len(choice.output_token_ids) for choice in self._choices]
        account = accounting.account(
            self._line,
            [choice.records for choice in self._choices],
            tokens,
            self._mesh.settings.slo_target(prepared.model, self._tenant),
            self._loop.time(),
        )
        usage = generation_pb2.Usage(
            prompt_tokens=len(prepared.prompt),
            completion_tokens=sum(tokens),
            cached_tokens=min(account.cached_tokens, len(prepared.prompt)),
            image_tokens=sum(item.rows for item in prepared.media),
        )
        self._conclude(span, account, usage, prepared)
        self._final = generation_pb2.GenerateResponse(
            request_id=self._label,
            model=prepared.name,
            usage=usage,
            accounting=accounting.to_proto(account, self._trace_id),
        )

    def _conclude(self, span: Span, account: Account, usage: generation_pb2.Usage, prepared: Prepared) -> None:
        target = self._mesh.settings.slo_target(prepared.model, self._tenant)
        span.set_attribute(telemetry.SLO_TTFT_SECONDS, target.ttft_seconds)
        span.set_attribute(telemetry.SLO_MET, account.verdict.met)
        if account.verdict.blame:
            span.set_attribute(telemetry.SLO_BLAME, account.verdict.blame)
        span.set_attribute(telemetry.GEN_AI_INPUT_TOKENS, usage.prompt_tokens)
        span.set_attribute(telemetry.GEN_AI_OUTPUT_TOKENS, usage.completion_tokens)
        span.set_attribute(telemetry.CACHED_TOKENS, usage.cached_tokens)
        reasons = [types_pb2.FinishReason.Name(choice.finish_reason) for choice in self._choices]
        span.set_attribute(telemetry.GEN_AI_FINISH_REASONS, [r.removeprefix("FINISH_REASON_").lower() for r in reasons])
        self._mesh.observer.finished(prepared.model, self._tenant, account, usage)

    def _prompt(self) -> generation_pb2.Prompt | None:
        """What the first message says of it. The first tokens of all choices have come together."""
        prepared = self._prepared
        if prepared is None or (prepared.echo is None and prepared.sampling.prompt_logprobs is None):
            return None
        return generation_pb2.Prompt(
            text=prepared.echo or "", token_ids=prepared.prompt, logprobs=self._choices[0].prompt_logprobs or ()
        )

    def _last_message(self) -> generation_pb2.GenerateResponse:
        if self._final is None:
            raise EpdError("the request ended without a result")
        return self._final


def _describe(span: Span, prepared: Prepared) -> None:
    span.set_attribute(telemetry.GEN_AI_MODEL, prepared.name)
    span.set_attribute(telemetry.GEN_AI_TEMPERATURE, prepared.sampling.temperature)
    if prepared.sampling.max_tokens is not None:
        span.set_attribute(telemetry.GEN_AI_MAX_TOKENS, prepared.sampling.max_tokens)
