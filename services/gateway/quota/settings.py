"""How gateways keep their tenants' limits together."""

import msgspec

from common.bounds import Positive, Span


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The port is for other gateways alone; with TLS towards workers it has that, too."""

    bind: str = "127.0.0.1:0"  # host:port to listen on; port 0: a free one
    advertise: str = ""  # host that other gateways reach it by; empty: that of `bind`
    lease_ttl_seconds: Positive = 10  # how long a dead gateway keeps its part of every limit
    answer_seconds: Span = 1.0  # for an owner to answer; then this gateway counts for itself
