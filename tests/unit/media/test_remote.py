"""Images by URL, from servers on loopback; case D7: what must not be called is not called."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from common.errors import InvalidArgument
from common.media.addresses import is_public
from common.media.limits import MediaLimits
from common.media.remote import RemoteImages, RemoteSettings
from tests.unit.media.files import encoded, noise

IMAGE = encoded(noise(16, 16))


class Site:
    """An HTTP/1.1 server on 127.0.0.1: `answers` by path, connections counted."""

    def __init__(self, answers: dict[str, bytes | Callable[[], bytes]], tls: ssl.SSLContext | None = None) -> None:
        self.answers = answers
        self.connections = 0
        self.requests: list[bytes] = []
        self._tls = tls

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            answer = self.answers[head.split()[1].decode()]
            data = answer() if callable(answer) else answer
            if data != b"silence":
                writer.write(data)
                await writer.drain()
            else:
                await reader.read()
        writer.close()


def ok(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(where: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode()


ANSWERS: dict[str, bytes | Callable[[], bytes]] = {
    "/image.png?x=1": ok(IMAGE),
    "/typed": ok(IMAGE, "content-type: text/html"),
    "/page": ok(b"<html>internal</html>", "content-type: image/png"),
    "/missing": b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\nno!",
    "/packed": ok(IMAGE, "content-encoding: gzip"),
    "/large": ok(IMAGE, length=10**9),
    "/endless": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + (b"8000\r\n" + bytes(0x8000) + b"\r\n") * 64,
    "/cut": ok(IMAGE[:50], length=len(IMAGE)),
    "/noise": b"\x16\x03\x01 what is this",
    "/silent": b"silence",
    "/there": redirect("/image.png?x=1"),
    "/loop": redirect("/loop"),
    "/metadata": redirect("http://169.254.169.254/latest/meta-data/"),
    "/file": redirect("file:///etc/passwd"),
}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    found = Site(dict(ANSWERS))
    await found.start()
    yield found
    await found.stop()


class Names:
    """A resolver of our own; `asked` counts."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextlib.asynccontextmanager
async def fetcher(
    site: Site, names: Names, limits: MediaLimits | None = None, **settings: object
) -> AsyncIterator[RemoteImages]:
    hosts = (f"pictures.example:{site.port}", f"other.example:{site.port}")
    fields = {"hosts": hosts, "allow_http": True, "allow_private": True} | settings
    images = RemoteImages(RemoteSettings(**fields), limits, resolve=names)  # type: ignore[arg-type]
    yield images
    await images.close()


async def refused(images: RemoteImages, url: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        await images.fetch(url, "images[0]")
    assert caught.value.field == "images[0]"
    assert "example" not in caught.value.message
    assert "latest" not in caught.value.message
    return caught.value.message


async def test_an_image_of_a_listed_host(site: Site) -> None:
    names = Names(["127.0.0.1"])
    async with fetcher(site, names) as images:
        for path in ("/image.png?x=1", "/there", "/typed"):
            assert await images.fetch(f"http://Pictures.Example:{site.port}{path}") == IMAGE
    assert set(names.asked) == {"pictures.example"}
    assert f"host: pictures.example:{site.port}" in site.requests[0].decode().lower()


async def test_case_d7_off_by_default(site: Site) -> None:
    names = Names(["127.0.0.1"])
    async with fetcher(site, names, hosts=()) as images:
        assert "off" in await refused(images, f"http://pictures.example:{site.port}/image.png?x=1")
    assert not names.asked
    assert not site.connections


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "localhost",
    ],
)
async def test_case_d7_addresses_that_are_not_called(site: Site, address: str) -> None:
    assert not is_public(address)
    # The public one first: one bad address is enough.
    for answer in ([address], ["93.184.216.34", address]):
        async with fetcher(site, Names(answer), allow_private=False) as images:
            assert "address" in await refused(images, f"http://pictures.example:{site.port}/image.png?x=1")
    assert not site.connections


def test_public_addresses() -> None:
    assert is_public("93.184.216.34")
    assert is_public("2606:4700::6810:84e5")


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:PORT/image.png?x=1",
        "http://127.0.0.1:PORT/image.png?x=1",
        "http://[::1]:PORT/image.png?x=1",
        "http://0x7f000001:PORT/",
        "http://pictures.example/image.png?x=1",
        "http://pictures.example:1/image.png?x=1",
        "http://pictures.example.evil.example:PORT/",
        "http://pictures.example:PORT@localhost:PORT/",
        "http://localhost:PORT#@pictures.example:PORT/",
        "http://localhost:PORT\\@pictures.example:PORT/",
        "http://pictures.example:PORT\t/",
        "http://pictures。example:PORT/",
        "http://pictures.example:99999/",
        "http://:PORT/",
        "https:///image.png",
        "ftp://pictures.example:PORT/",
        "file:///etc/passwd",
        "gopher://pictures.example:PORT/",
        "pictures.example",
        "",
        "http://pictures.example:PORT/" + "x" * 5000,
    ],
)
async def test_case_d7_urls_that_are_not_called(site: Site, url: str) -> None:
    names = Names(["127.0.0.1"])
    async with fetcher(site, names) as images:
        await refused(images, url.replace("PORT", str(site.port)))
    assert not names.asked
    assert not site.connections


async def test_plain_http_only_when_allowed(site: Site) -> None:
    async with fetcher(site, Names(["127.0.0.1"]), allow_http=False) as images:
        assert "https" in await refused(images, f"http://pictures.example:{site.port}/image.png?x=1")
    assert not site.connections


@pytest.mark.parametrize("path", ["/metadata", "/file", "/loop"])
async def test_case_d7_redirects_are_checked_and_counted(site: Site, path: str) -> None:
    names = Names(["127.0.0.1"])
    async with fetcher(site, names, max_redirects=2) as images:
        await refused(images, f"http://pictures.example:{site.port}{path}")
    assert site.connections == (3 if path == "/loop" else 1)
    assert set(names.asked) == {"pictures.example"}


async def test_case_d7_redirect_to_a_listed_name_with_a_private_address(site: Site) -> None:
    """The first answer comes from a public address, as far as the check can tell; the redirect's target does not."""
    inner = Site(dict(ANSWERS))
    await inner.start()
    site.answers["/inner"] = redirect(f"http://inner.example:{inner.port}/image.png?x=1")
    seen: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        seen.append(host)
        return ["127.0.0.1"]

    def checked(address: str) -> bool:
        return seen[-1] == "pictures.example"

    hosts = (f"pictures.example:{site.port}", f"inner.example:{inner.port}")
    images = RemoteImages(RemoteSettings(hosts=hosts, allow_http=True), resolve=resolve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.media.remote.is_public", checked)
        assert "address" in await refused(images, f"http://pictures.example:{site.port}/inner")
    await images.close()
    await inner.stop()
    assert seen == ["pictures.example", "inner.example"]
    assert (site.connections, inner.connections) == (1, 0)


async def test_case_d7_a_name_is_resolved_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the address that was checked is the one that is called, whatever the next answer would be."""
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    asked: list[str] = []

    def system(*arguments: object, **options: object) -> None:
        asked.append(str(arguments[0]))
        raise OSError

    async with fetcher(site, names) as images:
        monkeypatch.setattr("socket.getaddrinfo", system)
        assert await images.fetch(f"http://pictures.example:{site.port}/image.png?x=1") == IMAGE
    assert names.asked == ["pictures.example"]
    assert "pictures.example" not in asked


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/page", "no image of a known type"),
        ("/missing", "status 404"),
        ("/packed", "content-encoding"),
        ("/large", "1000000000 bytes; at most 100000"),
        ("/endless", "at most 100000"),
        ("/cut", "broke off"),
        ("/noise", "broke off"),
    ],
)
async def test_answers_that_are_no_image(site: Site, path: str, words: str) -> None:
    async with fetcher(site, Names(["127.0.0.1"]), MediaLimits(max_file_bytes=100_000)) as images:
        assert words in await refused(images, f"http://pictures.example:{site.port}{path}")


async def test_an_answer_that_does_not_come(site: Site) -> None:
    async with fetcher(site, Names(["127.0.0.1"]), timeout_seconds=0.05) as images:
        assert "within 0.05 s" in await refused(images, f"http://pictures.example:{site.port}/silent")


async def test_nobody_listens(site: Site) -> None:
    await site.stop()
    async with fetcher(site, Names(["127.0.0.1"])) as images:
        assert "cannot be reached" in await refused(images, f"http://pictures.example:{site.port}/image.png?x=1")


@pytest.mark.parametrize("host", ["http://a.example", "a.example/x", "a b", "", "a.*.example", "a.example:"])
def test_listed_names_are_names(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"remote\.hosts"):
        RemoteImages(RemoteSettings(hosts=(host,)))


@pytest.mark.parametrize(
    ("listed", "host", "fits"),
    [
        ("*.pictures.example", "a.pictures.example", True),
        ("*.pictures.example", "pictures.example", False),
        ("*.pictures.example", "apictures.example", False),
        ("*", "any.example", True),
    ],
)
async def test_listed_patterns(site: Site, listed: str, host: str, fits: bool) -> None:
    async with fetcher(site, Names(["127.0.0.1"]), hosts=(f"{listed}:{site.port}",)) as images:
        url = f"http://{host}:{site.port}/image.png?x=1"
        if fits:
            assert await images.fetch(url) == IMAGE
        else:
            await refused(images, url)


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed, for pictures.example."""
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / "key.pem"))
    name = ("-subj", "/CN=pictures", "-addext", "subjectAltName=DNS:pictures.example")
    openssl("req", "-x509", *new_key, "-out", str(folder / "cert.pem"), "-days", "2", *name)
    return folder


async def test_tls_goes_by_the_name(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    site = Site(dict(ANSWERS), context)
    await site.start()
    trusted = str(certificate / "cert.pem")
    async with fetcher(site, Names(["127.0.0.1"]), allow_http=False, ca_file=trusted) as images:
        assert await images.fetch(f"https://pictures.example:{site.port}/image.png?x=1") == IMAGE
        assert "cannot be reached" in await refused(images, f"https://other.example:{site.port}/image.png?x=1")
    async with fetcher(site, Names(["127.0.0.1"]), allow_http=False) as images:  # not an authority we know
        assert "cannot be reached" in await refused(images, f"https://pictures.example:{site.port}/image.png?x=1")
    await site.stop()
    assert len(site.requests) == 1
