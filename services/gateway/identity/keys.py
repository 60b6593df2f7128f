"""API keys: made once, shown once, kept as hashes."""

import hashlib
import re
import secrets
from typing import Annotated

import msgspec

from common.registry.record import PROTOCOL_VERSION

_PREFIX = "epd-"
_KEY_BYTES = 32
_MAX_KEY_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64

TenantName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TENANT_CHARACTERS)]
KeyHash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Label = Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARACTERS)]
ID_CHARACTERS = 12  # of the hash, by which people name a key


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a tenant; in etcd under /epd/keys/<hash>."""

    protocol_version: int = PROTOCOL_VERSION
    hash: KeyHash  # of the key, see hash_key
    tenant: TenantName
    name: Label = ""  # for people
    created: Label = ""  # date, for people

    def __post_init__(self) -> None:
        if not self.tenant.isprintable():
            raise ValueError("a tenant's name must be printable")

    @property
    def entry_id(self) -> str:
        return self.hash

    @property
    def key_id(self) -> str:
        return self.hash[:ID_CHARACTERS]


def make_key() -> str:
    """256 random bits, in URL-safe letters."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> str:
    """sha256, in hexadecimal.

    A plain hash is right here, unlike for passwords: a key has 256 random bits, so it cannot be guessed however fast a
    hash is, and no salt is needed. How long a look-up of the hash takes tells nothing of any key: whoever sends guesses
    cannot steer what they hash to.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(authorization: str) -> str | None:
    """The key in an authorization header; None when there is none in it."""
    found = re.fullmatch(r"bearer +(\S+) *", authorization, re.IGNORECASE)
    return found[1] if found and len(found[1]) <= _MAX_KEY_CHARACTERS else None
