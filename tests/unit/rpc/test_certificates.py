"""Certificates that are made, and the words for those that cannot be used."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from common.errors import InvalidArgument
from common.rpc.certificates import CA_KEY, Authority, issued_names
from common.rpc.peer_name import CLIENT, GATEWAY, WORKER, PeerName, from_uri
from common.rpc.tls import TlsOptions, from_directory
from tests.certificates import mesh_certificates, tls_of

WORKER_0 = PeerName(WORKER, "prefill-0")
DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return mesh_certificates(tmp_path / "certs")


def test_names_purposes_and_file_modes(authority: Authority) -> None:
    folder = authority.directory
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {name.id for name in issued_names(folder)} == {"gateway", "etcd", "operator", "prefill-0", "decode-0"}
    found = x509.load_pem_x509_certificate((folder / "prefill-0.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # Its id and nothing else: with "localhost" in it, it could pass for another on this machine.
    assert names.get_values_for_type(x509.DNSName) == ["prefill-0"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://epd-mesh/worker/prefill-0"]
    people = x509.load_pem_x509_certificate((folder / "operator.pem").read_bytes())
    purposes = people.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [purpose.dotted_string for purpose in purposes] == ["1.3.6.1.5.5.7.3.2"]  # never a server


def test_uri_round_trip_and_foreign_uris() -> None:
    assert from_uri(WORKER_0.uri) == WORKER_0
    for foreign in ("spiffe://other/worker/x", "spiffe://epd-mesh/king/x", "spiffe://epd-mesh/worker/", "worker/x", ""):
        assert from_uri(foreign) is None


@pytest.mark.parametrize("peer_id", ["", "root", "ca", "localhost", "../x", "*.x", "Upper", "10.0.0.1", "a" * 64])
def test_ids_that_no_certificate_gets(authority: Authority, peer_id: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be an id"):
        authority.issue(PeerName(WORKER, peer_id))


def test_one_id_is_of_one_role_and_no_host_has_a_workers_name(authority: Authority) -> None:
    with pytest.raises(InvalidArgument, match="a worker already"):
        authority.issue(PeerName(GATEWAY, "prefill-0"))
    with pytest.raises(InvalidArgument, match="id of a worker"):
        authority.issue(PeerName(GATEWAY, "gateway"), ["prefill-0"])
    with pytest.raises(InvalidArgument, match="by its id alone"):
        authority.issue(WORKER_0, ["localhost"])
    with pytest.raises(InvalidArgument, match="role is one of"):
        authority.issue(PeerName("king", "x"))


def test_a_key_that_was_not_kept_issues_nothing(tmp_path: Path) -> None:
    Authority.create(tmp_path / "a", keep_key=False)
    assert not (tmp_path / "a" / CA_KEY).exists()
    with pytest.raises(InvalidArgument, match="epd certs ca"):
        Authority.load(tmp_path / "a")
    with pytest.raises(InvalidArgument, match="authority already"):
        Authority.create(tmp_path / "a")


def test_copies_for_another_host(authority: Authority, tmp_path: Path) -> None:
    authority.issue(WORKER_0, into=tmp_path / "host")
    assert {path.name for path in (tmp_path / "host").iterdir()} == {"ca.pem", "prefill-0.pem", "prefill-0.key"}
    from_directory(tmp_path / "host", "prefill-0").check(WORKER_0)


def test_expired_and_not_yet_valid_say_what_to_do(authority: Authority) -> None:
    now = datetime.now(UTC)
    authority.issue(WORKER_0, begin=now - 2 * DAY, days=1)
    with pytest.raises(InvalidArgument, match=r"prefill-0\.pem expired on .* `epd certs issue worker prefill-0`"):
        tls_of(authority, "prefill-0").check(WORKER_0)
    authority.issue(WORKER_0, begin=now + 2 * DAY, days=1)
    with pytest.raises(InvalidArgument, match=r"valid from .* set this machine's clock, or get a new one"):
        tls_of(authority, "prefill-0").check(WORKER_0)
    authority.issue(WORKER_0, days=1)
    assert tls_of(authority, "prefill-0").check(WORKER_0) == pytest.approx((now + DAY).timestamp(), abs=60)


def test_anothers_name_key_and_authority(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is of worker decode-0, but this is worker prefill-0"):
        tls_of(authority, "decode-0").check(WORKER_0)
    with pytest.raises(InvalidArgument, match="is of client operator"):
        tls_of(authority, "operator").check(PeerName(GATEWAY, ""))
    tls_of(authority, "operator").check(PeerName(CLIENT, ""))  # of any id
    mixed = TlsOptions(
        ca_file=tls_of(authority, "etcd").ca_file,
        cert_file=tls_of(authority, "etcd").cert_file,
        key_file=tls_of(authority, "gateway").key_file,
    )
    with pytest.raises(InvalidArgument, match="do not belong together"):
        mixed.check()
    other = mesh_certificates(tmp_path / "other")
    foreign = TlsOptions(
        ca_file=tls_of(authority, "etcd").ca_file,
        cert_file=tls_of(other, "prefill-0").cert_file,
        key_file=tls_of(other, "prefill-0").key_file,
    )
    with pytest.raises(InvalidArgument, match="not issued by the authority"):
        foreign.check(WORKER_0)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(InvalidArgument, match="no certificate in PEM"):
        TlsOptions(cert_file=str(broken), key_file=str(broken)).check()
