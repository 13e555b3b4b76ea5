"""Who may talk to whom. Dask's messages are pickles: whoever can send one can run code as the one who reads it.

So both ends show certificates of one authority (mutual TLS), except towards a scheduler on this machine.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mtabench.errors import UsageError

if TYPE_CHECKING:
    from distributed import Security

# What Dask's configuration must have, and the attribute of a Security object.
TLS = {
    "distributed.comm.tls.ca-file": "tls_ca_file",
    "distributed.comm.tls.client.cert": "tls_client_cert",
    "distributed.comm.tls.client.key": "tls_client_key",
}


def security_of(address: str) -> Security | None:
    """The credentials for a scheduler by Dask's configuration; None for plain loopback.

    Raises UsageError for an address that is none, for one beyond this machine without TLS, and for TLS without an
    authority, a certificate or a key that are there.
    """
    scheme, host = _parts(address)
    if scheme == "tcp":
        if not _is_loopback(host):
            raise UsageError(
                f"--scheduler {address} is not encrypted, and anybody on the network could run code here; "
                f"plain tcp:// is for this machine only, so start the cluster with TLS and give tls://{host}:PORT"
            )
        return None
    from distributed import Security

    security = Security(require_encryption=True)
    for setting, name in TLS.items():
        path = getattr(security, name)
        if path is None or not Path(path).is_file():
            given = "it is not set" if path is None else f"there is no file {path}"
            raise UsageError(
                f"--scheduler {address} needs {setting} in Dask's configuration, a PEM file that the cluster uses, and "
                f"{given}; docs/cluster.md says how"
            )
    try:
        security.get_connection_args("client")
    except OSError as error:
        raise UsageError(f"the TLS files for {address} cannot be used: {error}; expected PEM files") from error
    return security


def _parts(address: str) -> tuple[str, str]:
    """Scheme and host of tls://HOST:PORT or tcp://HOST:PORT."""
    try:
        parts = urlsplit(address)
        if parts.scheme in ("tls", "tcp") and parts.hostname and parts.port and not parts.path:
            return parts.scheme, parts.hostname
    except ValueError:  # a port that is no number
        pass
    raise UsageError(f"--scheduler {address!r} is no address; expected tls://HOST:PORT, such as tls://node01:8786")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
