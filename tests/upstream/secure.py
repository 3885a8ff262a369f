"""Servers that let in only who proves who he is, over TLS, with certificates made for the occasion."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from urllib.parse import quote

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it does not say what it exports
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tools.services import KafkaServer, NatsServer

__all__ = ["PASSWORD", "USER", "WHO", "Papers", "SecureKafka", "SecureNats"]

USER = "post bus"
PASSWORD = 'p@ss/w:rd "1\\'  # noqa: S105 - of a server that lives for one test
QUOTED = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
WHO = f"{quote(USER, safe='')}:{quote(PASSWORD, safe='')}"
LOGIN = "org.apache.kafka.common.security"


class Papers:
    """An authority, and what it has signed: a certificate for the server on 127.0.0.1, and one for its client."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name("authority")
        self.authority = self._keep("authority", self._signed("authority", self._key, authority=True))
        self.server, self.server_key = self._pair("server")
        self.client, self.client_key = self._pair("client")

    def _pair(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._keep(name, self._signed(name, key)), self._keep(f"{name}-key", pem)

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> bytes:
        now = dt.datetime.now(dt.UTC)
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
            builder = builder.add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
            builder = builder.add_extension(usage, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _keep(self, name: str, pem: bytes) -> Path:
        path = self.folder / f"{name}.pem"
        path.write_bytes(pem)
        return path


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"postbus {name}")])


class SecureKafka(KafkaServer):
    """A Kafka that asks for a password on its second port, over TLS; its first port is as ever."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.papers = papers = Papers(folder / "papers")
        both = papers.folder / "keystore.pem"
        both.write_bytes(papers.server_key.read_bytes() + papers.server.read_bytes())
        settings = self._settings.read_text(encoding="utf-8")
        settings = settings.replace("BACK:PLAINTEXT", "BACK:SASL_SSL").replace(
            f"BACK://127.0.0.1:{self.detour_port}", f"BACK://127.0.0.1:{self.back_port}"
        )
        more = {
            "listener.name.back.sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
            "listener.name.back.scram-sha-512.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
            "listener.name.back.scram-sha-256.sasl.jaas.config": f"{LOGIN}.scram.ScramLoginModule required;",
            "listener.name.back.plain.sasl.jaas.config": f'{LOGIN}.plain.PlainLoginModule required user_plain="plain";',
            "listener.name.back.ssl.keystore.type": "PEM",
            "listener.name.back.ssl.keystore.location": str(both),
            "listener.name.back.ssl.truststore.type": "PEM",
            "listener.name.back.ssl.truststore.location": str(papers.authority),
            "listener.name.back.ssl.client.auth": "requested",
        }
        self._settings.write_text(
            settings + "".join(f"{name}={value}\n" for name, value in more.items()), encoding="utf-8"
        )
        self.secure = f"127.0.0.1:{self.back_port}"

    def start(self) -> None:
        """See ``Server.start``; also makes ``USER``. The user ``plain``, with that password, is in the settings."""
        super().start()
        known = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        admin = AdminClient({"bootstrap.servers": self.address})
        for done in admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, known, PASSWORD.encode())]
        ).values():
            done.result()


class SecureNats(NatsServer):
    """A NATS server that asks for a password and a certificate of its authority's, over TLS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.papers = Papers(folder / "papers")

    def command(self) -> list[str]:
        """See ``Server.command``."""
        words = super().command()
        papers = self.papers
        with Path(words[-1]).open("a", encoding="utf-8") as config:
            config.write(
                f'tls {{ cert_file: "{papers.server}", key_file: "{papers.server_key}", ca_file: "{papers.authority}", '
                f'verify: true }}\nauthorization {{ user: "{USER}", password: "{QUOTED}" }}\n'
            )
        return words
