"""Where a gateway's keys and tenants come from."""

from typing import Literal

import msgspec


class IdentitySettings(msgspec.Struct, frozen=True, kw_only=True):
    """source "off": nobody needs a key; the header x-epd-tenant names the tenant, and is believed."""

    source: Literal["off", "file", "etcd"] = "off"
    file: str = ""  # YAML, for source "file"; see identity/file.py
    admins: tuple[str, ...] = ()  # tenants that may load and unload LoRA adapters, where keys are needed
    reload_seconds: float = 1.0  # between looks at whether the file has changed
