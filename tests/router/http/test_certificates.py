"""TLS certificates are replaced while the server runs."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.router.conftest import StartServer, eventually


def write_certificate(directory: Path, name: str) -> None:
    """Write a certificate for ``name`` and its key to one file, as some tools do."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    content = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    aside = directory / "new.pem"
    aside.write_bytes(content)
    aside.rename(directory / "both.pem")


def test_a_changed_certificate_is_used_and_a_broken_one_is_not(
    start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "both.pem"
    write_certificate(tmp_path, "first")
    server = start_server(f"--ssl-certfile={file}")
    host, port = server.url.removeprefix("https://").split(":")

    def name() -> str:
        pem = ssl.get_server_certificate((host, int(port)), timeout=10)
        attribute = x509.load_pem_x509_certificate(pem.encode()).subject
        return str(attribute.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)

    assert name() == "first"
    write_certificate(tmp_path, "second")
    eventually(lambda: name() == "second", 30)
    file.write_text("nonsense")
    eventually(lambda: "the TLS certificate stays as it was" in server.log.read_text(), 30)
    assert name() == "second"
    write_certificate(tmp_path, "third")
    eventually(lambda: name() == "third", 30)
