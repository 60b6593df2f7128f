"""Every channel there is, and which of them a worker may use."""

from collections.abc import Sequence

from common.errors import InvalidArgument
from common.transfer.channel import Channel
from common.transfer.channel_grpc import GrpcChannel
from common.transfer.channel_shm import ShmChannel

CHANNELS: dict[str, type[Channel]] = {channel.name: channel for channel in (ShmChannel, GrpcChannel)}  # best first


def allowed_channels(wanted: Sequence[str] = (), *, encrypted: bool) -> tuple[str, ...]:
    """The wanted channels, all if none is named. encrypted: in a mesh with TLS, where no others are allowed.

    Both ends of a pull go by this: the puller offers no other and takes no other, the owner chooses no other.
    Raises InvalidArgument for a channel that is unknown, or named although it does not encrypt.
    """
    for name in wanted:
        if name not in CHANNELS:
            raise InvalidArgument(f"channels: {name!r} is none of {', '.join(CHANNELS)}", field="channels")
        if encrypted and not CHANNELS[name].encrypted:
            usable = ", ".join(other for other, channel in CHANNELS.items() if channel.encrypted)
            raise InvalidArgument(
                f"channels: {name} does not encrypt, and under TLS bytes travel on channels that do: {usable}; leave "
                f"{name} out, or turn TLS off",
                field="channels",
            )
    return tuple(name for name in wanted or CHANNELS if CHANNELS[name].encrypted or not encrypted)
