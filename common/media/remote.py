"""Images by URL: off unless hosts are listed, and then no way into the network that the gateway stands in.

Every request, that of a redirect too, is checked alike: scheme, listed host, port. A listed name is resolved once, all
addresses that it has must be public, and the connection goes to the very one that was checked. Why, and why httpcore:
docs/adr/0010-remote-images.md.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore
import msgspec

from common.errors import InvalidArgument
from common.media.addresses import is_public
from common.media.header import sniff
from common.media.limits import MediaLimits

MAX_URL_CHARACTERS = 4096
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"https": 443, "http": 80}
_HEADERS = ((b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"epd-mesh"))
_LISTED = re.compile(r"(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_NOT_IN_URLS = re.compile(r"[^!-~]|\\")
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fetching of images by URL."""

    # Names that images may come from; none: remote images are off. "images.example", its subdomains "*.images.example",
    # any name "*". A port other than the scheme's own is part of the entry: "images.example:8443".
    hosts: tuple[str, ...] = ()
    allow_http: bool = False  # http: as well as https:
    allow_private: bool = False  # listed hosts may have private addresses: for a site's own image store
    timeout_seconds: float = 10.0  # an image, redirects included
    max_redirects: int = 3
    max_connections: int = 16
    ca_file: str = ""  # PEM of the authorities to trust instead of the public ones


class _Blocked(Exception):
    """The name leads to an address that must not be called."""


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Addresses of a name by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class RemoteImages:
    """Used from one event loop. `close` when done."""

    def __init__(
        self, settings: RemoteSettings, limits: MediaLimits | None = None, *, resolve: Resolver = resolve_host
    ) -> None:
        """Raises InvalidArgument for an entry of hosts that is no name, or a ca_file that cannot be read."""
        self._settings = settings
        self._limits = limits or MediaLimits()
        self._hosts = [_entry(host) for host in settings.hosts]
        try:
            context = ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else None
        except OSError as error:
            raise InvalidArgument(f"remote.ca_file cannot be read: {error.strerror}", field="remote") from None
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=settings.max_connections,
            max_keepalive_connections=0,  # every image is checked on its own
            network_backend=_CheckedBackend(resolve, settings.allow_private),
        )

    async def close(self) -> None:
        await self._pool.aclose()

    async def fetch(self, url: str, field: str = "url") -> bytes:
        """The image file there. Raises InvalidArgument saying why not, and never quoting the URL."""
        settings = self._settings
        if not url:
            raise _wrong(field, "the url is empty")
        if not self._hosts:
            raise _wrong(field, "images by URL are off at this gateway; send a data: URI")
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                for _ in range(settings.max_redirects + 1):
                    found, url = await self._get(url, field)
                    if found is not None:
                        sniff(found, field)
                        return found
        except TimeoutError:
            raise _wrong(field, f"the image did not come within {settings.timeout_seconds:g} s") from None
        except _Blocked:
            raise _wrong(field, "the URL's host has an address that this gateway does not call") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise _wrong(field, "the URL's host cannot be reached, or its answer broke off") from None
        raise _wrong(field, f"the URL redirects more than {settings.max_redirects} times")

    async def _get(self, url: str, field: str) -> tuple[bytes | None, str]:
        """One request: the file, or None and where it redirects to."""
        target = self._checked(url, field)
        async with self._pool.stream("GET", target, headers=list(_HEADERS)) as response:
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS:
                return None, urljoin(url, headers.get(b"location", b"").decode("latin-1"))
            if response.status != 200:
                raise _wrong(field, f"the URL's host answered with status {response.status}")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise _wrong(field, "the URL's host answered with a content-encoding that was not asked for")
            length = headers.get(b"content-length", b"")
            if length.isdigit():
                self._limits.check_file(int(length[:20]), field)
            data = bytearray()
            async for piece in response.aiter_stream():
                data += piece
                self._limits.check_file(len(data), field)
            return bytes(data), ""

    def _checked(self, url: str, field: str) -> httpcore.URL:
        """Put together from the very parts that were checked, so that no two parsers can differ about it."""
        if len(url) > MAX_URL_CHARACTERS:
            raise _wrong(field, f"a URL may have {MAX_URL_CHARACTERS} characters at most")
        if _NOT_IN_URLS.search(url):
            raise _wrong(field, "a URL must be plain ASCII without spaces; others are percent-encoded, names punycode")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _wrong(field, "this is no valid URL") from None
        schemes = ("https", "http") if self._settings.allow_http else ("https",)
        if parts.scheme not in schemes:
            raise _wrong(field, f"a URL's scheme must be data or {' or '.join(schemes)}")
        if "@" in parts.netloc:
            raise _wrong(field, "a URL must not hold a user's name")
        host, default = (parts.hostname or "").removesuffix("."), _PORTS[parts.scheme]
        port = default if port is None else port
        if not _HOST.fullmatch(host):
            raise _wrong(field, "the URL's host is no name")
        if not any(_fits(host, name) and port == (number or default) for name, number in self._hosts):
            raise _wrong(field, "the URL's host and port are not among those that this gateway fetches from")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=path)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to an address that has passed the check. TLS still goes by the name."""

    def __init__(self, resolve: Resolver, allow_private: bool) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._resolve = resolve
        self._allow_private = allow_private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises _Blocked before any connection when one address of the name is not public."""
        addresses = await self._resolve(host, port)
        if not self._allow_private and not all(is_public(address) for address in addresses):
            raise _Blocked
        failure: Exception = httpcore.ConnectError("the name has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


def _entry(host: str) -> tuple[str, int]:
    """Name and port of an entry of hosts; port 0: the scheme's own."""
    if not _LISTED.fullmatch(host.lower()):
        raise InvalidArgument(f"remote.hosts: {host!r} is not name, *.name or * with perhaps a :port", field="remote")
    name, _, port = host.lower().partition(":")
    return name, int(port or 0)


def _fits(host: str, name: str) -> bool:
    return host == name or name == "*" or (name.startswith("*.") and host.endswith(name[1:]))


def _wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {what}", field=field)
