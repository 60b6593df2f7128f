"""Which addresses may be called on a client's word: those of the public internet."""

import ipaddress


def is_public(address: str) -> bool:
    """False for loopback, private, link-local, multicast, reserved and shared ranges, for IPv6 addresses that stand for
    IPv4 ones (mapped, NAT64, 6to4, Teredo), and for whatever is no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.version == 6 and (parsed.ipv4_mapped or parsed.sixtofour or parsed.teredo or parsed.is_site_local):
        return False
    # For IPv6 is_reserved includes ::/8, and with it what NAT64 makes of an IPv4 address.
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved
