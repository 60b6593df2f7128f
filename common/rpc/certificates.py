"""Certificates of the mesh: an authority in a directory, what it issues, and the check before one is used.

A certificate names its owner twice: by the registered id as a DNS name, which whoever connects expects, and by role
and id as a URI, by which a server knows its callers.
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import InvalidArgument
from common.rpc.peer_name import CLIENT, ETCD, GATEWAY, ROLES, PeerName, from_uri

CA_CERT, CA_KEY = "ca.pem", "ca.key"
DEFAULT_DAYS = 365
_SKEW = timedelta(minutes=5)  # between the clocks of two machines
_ID = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_RESERVED = {"ca", "root", "localhost"}  # root: etcd's administrator, who must have no certificate


def cert_file(directory: Path, peer_id: str) -> Path:
    return directory / f"{peer_id}.pem"


def key_file(directory: Path, peer_id: str) -> Path:
    return directory / f"{peer_id}.key"


class Authority:
    """Issues certificates into its directory (0700, files 0600). No two certificates have one id."""

    def __init__(self, directory: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.directory = directory
        self._certificate, self._key = certificate, key

    @classmethod
    def create(cls, directory: Path, *, days: int = DEFAULT_DAYS, keep_key: bool = True) -> "Authority":
        """keep_key False: nothing can be issued any more once this object is gone.

        Raises InvalidArgument when the directory has an authority.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (directory / CA_CERT).exists():
            raise InvalidArgument(f"{directory} has an authority already; choose another directory", field="dir")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "epd-mesh authority")])
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(subject, subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        _write(directory / CA_CERT, _pem(certificate))
        if keep_key:
            _write(directory / CA_KEY, _key_pem(key))
        return cls(directory, certificate, key)

    @classmethod
    def load(cls, directory: Path) -> "Authority":
        """Raises InvalidArgument when there is none, or its key was not kept."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / CA_CERT).read_bytes())
            key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), None)
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{directory} has no authority to issue with ({type(error).__name__}); make one: `epd certs ca`",
                field="dir",
            ) from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(directory, certificate, key)

    def issue(
        self,
        name: PeerName,
        hosts: Sequence[str] = (),
        *,
        days: int = DEFAULT_DAYS,
        begin: datetime | None = None,
        into: Path | None = None,
    ) -> Path:
        """Writes <id>.pem and <id>.key, an earlier one's place being taken. Returns the certificate's file.

        hosts: names and addresses that a gateway or an etcd is reached by; workers are known by their id alone.
        begin: of its days, now if not given.
        into: a directory that gets copies, with the authority's certificate, for another host.
        Raises InvalidArgument for a bad id, one of another role, or hosts of a role that has none.
        """
        self._check(name, hosts)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name.id)])  # by it etcd knows its user
        alternatives: list[x509.GeneralName] = [x509.DNSName(name.id), x509.UniformResourceIdentifier(name.uri)]
        alternatives += [_general_name(host) for host in hosts if host != name.id]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if name.role != CLIENT:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        last = self._certificate.not_valid_after_utc
        builder = _builder(subject, self._certificate.subject, key.public_key(), days, begin, last)
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage(purposes), False),
            (x509.SubjectAlternativeName(alternatives), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        certificate = builder.sign(self._key, hashes.SHA256())
        for directory in {self.directory, into or self.directory}:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(cert_file(directory, name.id), _pem(certificate))
            _write(key_file(directory, name.id), _key_pem(key))
            _write(directory / CA_CERT, _pem(self._certificate))
        return cert_file(into or self.directory, name.id)

    def _check(self, name: PeerName, hosts: Sequence[str]) -> None:
        if name.role not in ROLES:
            raise InvalidArgument(f"a role is one of {', '.join(ROLES)}, not {name.role!r}", field="role")
        if not _ID.fullmatch(name.id) or name.id in _RESERVED:
            raise InvalidArgument(
                f"{name.id!r} cannot be an id: 1 to 63 of a-z, 0-9, dot, dash and underscore, with a letter among "
                f"them, and none of {', '.join(sorted(_RESERVED))}",
                field="id",
            )
        if hosts and name.role not in (GATEWAY, ETCD):
            raise InvalidArgument(f"a {name.role} is known by its id alone, not by a host", field="host")
        issued = {other.id: other for other in issued_names(self.directory)}
        if (other := issued.get(name.id)) is not None and other.role != name.role:
            raise InvalidArgument(f"{name.id} is the id of a {other.role} already", field="id")
        for host in hosts:
            if host != name.id and host in issued:
                raise InvalidArgument(
                    f"{host} is the id of a {issued[host].role}; no host may be named so", field="host"
                )


def issued_names(directory: Path) -> Iterator[PeerName]:
    """Whom the certificates in a directory are of, by file name."""
    for path in sorted(directory.glob("*.pem")):
        if path.name != CA_CERT and (name := name_in(_load(path.read_bytes(), str(path)))) is not None:
            yield name


def name_in(certificate: x509.Certificate) -> PeerName | None:
    """None of a certificate that is not the mesh's."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    return from_uri(uris[0]) if len(uris) == 1 else None


def check(cert: bytes, key: bytes, ca: bytes | None, where: str, expected: PeerName | None = None) -> datetime:
    """The end of the certificate's validity, if it can be used here and now.

    cert, key, ca: PEM. where: the certificate's file, for the message. expected: whose it must be; an empty id: any.
    Raises InvalidArgument saying what is wrong and what to do: expired, not valid yet, another's, a foreign key or
    authority.
    """
    certificate, now = _load(cert, where), datetime.now(UTC)
    name = name_in(certificate)
    again = f"`epd certs issue {name.role} {name.id}`" if name else "its authority"
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= end:
        raise InvalidArgument(
            f"TLS: {where} expired on {end:%Y-%m-%d %H:%M} UTC; get a new one from {again}", field="tls"
        )
    if now < begin:
        raise InvalidArgument(
            f"TLS: {where} is valid from {begin:%Y-%m-%d %H:%M} UTC on and it is {now:%Y-%m-%d %H:%M} here; set this "
            f"machine's clock, or get a new one from {again}",
            field="tls",
        )
    try:
        matches = serialization.load_pem_private_key(key, None).public_key() == certificate.public_key()
    except (ValueError, TypeError):
        raise InvalidArgument(f"TLS: the key of {where} is no PEM file of an unencrypted key", field="tls") from None
    if not matches:
        raise InvalidArgument(f"TLS: {where} and its key do not belong together", field="tls")
    if expected is not None:
        _check_issuer(certificate, ca, where)
        if name is None or name.role != expected.role or expected.id not in ("", name.id):
            raise InvalidArgument(
                f"TLS: {where} is of {name or 'nobody in the mesh'}, but this is {expected}; they must be the same",
                field="tls",
            )
    return end


def _check_issuer(certificate: x509.Certificate, ca: bytes | None, where: str) -> None:
    for authority in x509.load_pem_x509_certificates(ca or b"") if ca else ():
        try:
            return certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
    raise InvalidArgument(f"TLS: {where} was not issued by the authority of ca_file", field="tls")


def _load(pem: bytes, where: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise InvalidArgument(f"TLS: {where} is no certificate in PEM", field="tls") from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    begin: datetime | None = None,
    last: datetime | None = None,
) -> x509.CertificateBuilder:
    begin = begin or datetime.now(UTC)
    end = begin + timedelta(days=days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begin - _SKEW).not_valid_after(min(end, last) if last else end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(**used: bool) -> x509.KeyUsage:
    first = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    names = (*first, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """0600 from its first moment, and never half of it."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    scratch.rename(path)
