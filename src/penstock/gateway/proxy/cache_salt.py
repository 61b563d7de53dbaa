"""Salts that keep tenants' prefix caches apart in servers that are not penstock's.

A salt is a keyed hash of a namespace, followed by the namespace itself: nobody without the key can make another
tenant's, and what a server says of its cache tells whose it is. The tenant's namespace and the client's own salt are
joined such that no salt can spell another namespace.
"""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

from penstock.core.hashing import cache_namespace

KEY_BYTES = 32
_TAG_BYTES = 16
_TAG_CHARS = 2 * _TAG_BYTES
_NOBODYS = "?"  # begins no namespace


class CacheSalts:
    """Salts of one key. All gateways in front of the same servers should have the same."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key, person=b"penstock.salt").digest()

    def salt(self, namespace: str, own: str = "") -> str:
        """`own`: what the client asks its prompts to be salted with; never empty, also where nobody has a namespace."""
        joined = cache_namespace(namespace, own)
        return self._tag(joined) + joined

    def namespace_of(self, salt: str) -> str:
        """The namespace as the router has it; for a salt that is not of this key, one that no request has."""
        if not salt:
            return ""
        tag, joined = salt[:_TAG_CHARS], salt[_TAG_CHARS:]
        return joined if compare_digest(tag.encode(), self._tag(joined).encode()) else _NOBODYS + salt

    def _tag(self, joined: str) -> str:
        return blake2b(joined.encode(errors="surrogatepass"), key=self._key, digest_size=_TAG_BYTES).hexdigest()


def key_in(path: Path) -> bytes:
    """The key that this file keeps; whoever comes first makes it. Raises OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with open(made, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(made, path)
        except FileExistsError:
            pass  # of another gateway, which was first
        finally:
            made.unlink()
    return path.read_bytes()
