"""What became of one request, on the client's clock."""

import msgspec

UNFINISHED = "UNFINISHED"  # still running when the load was interrupted: no success and no failure


class Outcome(msgspec.Struct, kw_only=True):
    """Times are seconds after the load's beginning. `arrivals` has one entry for each message with new tokens."""

    number: int
    due: float  # when it was to be sent
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""  # empty: answered; else the error's reason
    message: str = ""
    trace_id: str = ""

    @property
    def answered(self) -> bool:
        return not self.reason

    @property
    def ttft(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 with one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2e(self) -> float:
        """From sending to the stream's end."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages with new tokens: ITL, as far as a client can see it."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def met(self, ttft_seconds: float, tpot_seconds: float) -> bool:
        """Both targets, as DistServe has it. What failed has met nothing."""
        return self.answered and self.ttft <= ttft_seconds and self.tpot <= tpot_seconds
