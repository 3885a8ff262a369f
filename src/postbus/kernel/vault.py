"""The vault: encrypted secrets in files of their own that only the owner of the process can read, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

import msgspec
from cryptography.fernet import Fernet, InvalidToken

from postbus.model import Conflict, Forbidden, Invalid, LimitExceeded, NotFound, StorageError
from postbus.topics import check_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Vault"]

SECRET_BYTES_MAX = 64 * 1024
KERNEL = "kernel"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds. ``request`` names the event that asked for the secret."""

    secret_id: str
    owner: str
    request: str
    value: str


class Vault:
    """See ``SecretVault``. One file per secret, mode 0600, in a folder of mode 0700; replaced whole or not at all.

    They are encrypted under a key in a file beside the folder, so that no secret can be read from a copy of the folder
    alone. Nothing it raises or logs holds a secret.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._writing = asyncio.Lock()

    async def put(self, secret_id: str, value: str, *, owner: str, request: str = "") -> None:
        """See ``SecretVault.put``."""
        _check(value)
        path = self._path(secret_id)
        kept = _Kept(secret_id=secret_id, owner=owner, request=request, value=value)

        def write() -> None:
            known = _read(path)
            if known is not None and known.owner != owner:
                message = f"the secret {secret_id} belongs to {known.owner}"
                raise Conflict(message, hint="ask for one of another name")
            _write(path, _cipher(path).encrypt(msgspec.json.encode(kept)))

        async with self._writing:
            await asyncio.to_thread(write)

    async def get(self, secret_id: str, *, reader: str) -> str:
        """See ``SecretVault.get``; whoever asked for it may have it, and so may the kernel."""
        kept = await asyncio.to_thread(_read, self._path(secret_id))
        if kept is None:
            raise NotFound(f"there is no secret {secret_id}", hint="ask the user for it with context.request_secret")
        if reader not in (kept.owner, KERNEL):
            raise Forbidden(f"the secret {secret_id} belongs to {kept.owner}, not to {reader}")
        return kept.value

    async def delete(self, secret_id: str) -> bool:
        """See ``SecretVault.delete``."""
        path = self._path(secret_id)

        def remove() -> bool:
            _sweep(path)
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            return True

        async with self._writing:
            return await asyncio.to_thread(remove)

    async def owner_of(self, secret_id: str) -> str | None:
        """Return whose a secret is; None when there is none of that name."""
        kept = await asyncio.to_thread(_read, self._path(secret_id))
        return None if kept is None else kept.owner

    async def has(self, secret_id: str, *, request: str) -> bool:
        """Say whether a secret is there in answer to that request."""
        kept = await asyncio.to_thread(_read, self._path(secret_id))
        return kept is not None and kept.request == request

    def _path(self, secret_id: str) -> Path:
        return self._folder() / f"{check_id(secret_id, 'secret_id')}.secret"


def _check(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise Invalid("a secret is a text, and not an empty one")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        size = -1
    if size < 0:  # outside the handler: the error would hold the text
        raise Invalid("a secret is Unicode text without lone surrogates")
    if size > SECRET_BYTES_MAX:
        raise LimitExceeded(f"a secret has at most {SECRET_BYTES_MAX} bytes, not {size}")


def _read(path: Path) -> _Kept | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"the vault cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(_cipher(path).decrypt(raw), type=_Kept)
    except (msgspec.MsgspecError, InvalidToken):
        pass
    raise StorageError(
        f"the file of the secret {path.stem} cannot be read", hint="remove it and ask for the secret anew"
    )


def _cipher(path: Path) -> Fernet:
    """Return what locks and unlocks the files of a vault; its key is made when it is asked for first."""
    place = path.parent.with_suffix(".key")
    try:
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, fresh = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)  # of mode 0600
            with os.fdopen(handle, "wb") as file:
                file.write(Fernet.generate_key())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process has made one meanwhile
                os.link(fresh, place)
            os.unlink(fresh)  # noqa: PTH108 - the name that mkstemp gave
        return Fernet(place.read_bytes())
    except OSError as error:
        raise StorageError(f"the vault's key cannot be read or written: {error.strerror}") from None
    except ValueError:
        pass
    raise StorageError(f"{place.name} is not the key of a vault", hint="restore it, or remove the vault and ask anew")


def _write(path: Path, raw: bytes) -> None:
    """Replace a file, durably; nobody else can read it at any moment."""
    fresh = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        _sweep(path)
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)  # noqa: PTH105 - the name that mkstemp gave
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if fresh is not None:
            with contextlib.suppress(OSError):
                os.unlink(fresh)  # noqa: PTH108 - as above
        raise StorageError(f"the vault cannot be written: {error.strerror}") from None


def _sweep(path: Path) -> None:
    """Remove what a process that was killed left of writing a secret."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)
