"""How a connection to a remote is made safe, and as whom: the part of a remote's address that says so."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from postbus.model import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OPTIONS", "PASSWORD", "USER", "Security", "hosts_of", "security_of"]

OPTIONS: Final = ("tls", "cert", "key")
USER: Final = "POSTBUS_REMOTE_USER"
PASSWORD: Final = "POSTBUS_REMOTE_PASSWORD"  # noqa: S105 - its name
ON: Final = "on"
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Encrypted with ``tls``; the server is checked with the certificates in ``ca``, or else those of the system.

    ``user`` without a ``password`` is a token. ``sasl`` is how Kafka is told the password.
    """

    user: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    sasl: str | None = None

    def __repr__(self) -> str:
        return f"Security(tls={self.tls})"  # no password in any log

    def context(self) -> ssl.SSLContext | None:
        """Return what TLS connections are made with, None without TLS. Raises ``Invalid`` for files that do not do."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise Invalid(f"tls: {self.ca} has no certificates: {_why(error)}", hint="name a PEM file") from None
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key)
            except OSError as error:
                raise Invalid(
                    f"cert and key: {self.cert} and {self.key} are no certificate with its key: {_why(error)}",
                    hint="name PEM files",
                ) from None
        return context

    def kafka(self) -> dict[str, str]:
        """Return it as settings of Kafka's client. Raises ``Invalid`` for files that do not do."""
        self.context()  # the client would say less of what is wrong with the files
        named = self.user is not None
        found = {"security.protocol": f"{'SASL_' if named else ''}{'SSL' if self.tls else 'PLAINTEXT'}"}
        if self.tls:
            files = {"ssl.ca.location": self.ca, "ssl.certificate.location": self.cert, "ssl.key.location": self.key}
            found |= {name: path for name, path in files.items() if path is not None}
        if self.user is not None:
            if self.password is None:
                raise Invalid("Kafka wants a password with the user", hint="write kafka://USER:PASSWORD@HOST:PORT")
            found |= {"sasl.mechanism": self.mechanism, "sasl.username": self.user, "sasl.password": self.password}
        return {} if found == {"security.protocol": "PLAINTEXT"} else found

    @property
    def mechanism(self) -> str:
        """How Kafka is told the password; if nobody said so, then without TLS in a way that does not show it."""
        return self.sasl or ("PLAIN" if self.tls else "SCRAM-SHA-512")


def hosts_of(netloc: str) -> tuple[str, str]:
    """Return who somebody is, as it stands before the ``@`` of one host or of several, and the hosts without it."""
    parts = [host.rpartition("@") for host in netloc.split(",")]
    return next((who for who, at, _ in parts if at), ""), ",".join(host for _, _, host in parts)


def security_of(who: str, options: Mapping[str, str]) -> Security:
    """Return what an address says: ``who`` is what stands before its ``@``, or else what the environment says.

    Raises ``Invalid``.
    """
    user, colon, password = who.partition(":")
    given = (unquote(user), unquote(password) if colon else None)
    if not who and os.environ.get(USER):
        given = (os.environ[USER], os.environ.get(PASSWORD))
    tls, cert, key = (options.get(name) for name in OPTIONS)
    if "" in (tls, cert, key):
        raise Invalid("tls, cert and key name files; tls=on takes the certificates of the system")
    if (cert is None) != (key is None):
        raise Invalid("a certificate of ours comes with its key", hint="give both cert and key, or neither")
    if cert is not None and tls is None:
        raise Invalid("a certificate of ours is for TLS", hint="add tls=on, or tls=FILE")
    sasl = options.get("sasl")
    if sasl is not None and sasl not in MECHANISMS:
        raise Invalid(f"sasl is one of {', '.join(MECHANISMS)}, not {sasl!r}")
    ca = None if tls == ON else tls
    return Security(user=given[0] or None, password=given[1], tls=tls is not None, ca=ca, cert=cert, key=key, sasl=sasl)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
