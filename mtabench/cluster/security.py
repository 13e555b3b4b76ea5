"""Who may talk to whom. Dask's messages are pickles: whoever can send one can run code as the one who reads it.

So both ends show certificates of one authority (mutual TLS), except towards a scheduler on this machine.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mtabench.cluster_options import ClusterOptions
from mtabench.errors import UsageError

if TYPE_CHECKING:
    from distributed import Security

# Option, Dask's setting, the attribute of a Security object.
TLS = (
    ("tls_ca", "distributed.comm.tls.ca-file", "tls_ca_file"),
    ("tls_cert", "distributed.comm.tls.client.cert", "tls_client_cert"),
    ("tls_key", "distributed.comm.tls.client.key", "tls_client_key"),
)


def security_of(asked: ClusterOptions) -> Security | None:
    """The credentials for `--scheduler`, by the options or else by Dask's configuration; None for plain loopback.

    Raises UsageError for an address that is none, for one beyond this machine without TLS, and for TLS without an
    authority, a certificate or a key that are there.
    """
    assert asked.scheduler is not None
    scheme, host = _parts(asked.scheduler)
    if scheme == "tcp":
        if not _is_loopback(host):
            raise UsageError(
                f"--scheduler {asked.scheduler} is not encrypted, and anybody on the network could run code here; "
                f"plain tcp:// is for this machine only, so start the cluster with TLS and give tls://{host}:PORT"
            )
        if any(getattr(asked, option) is not None for option, _, _ in TLS):
            raise UsageError(f"--scheduler {asked.scheduler} is plain tcp://, which takes no --tls-...; give tls://")
        return None
    from distributed import Security

    given = {name: str(path) for option, _, name in TLS if (path := getattr(asked, option)) is not None}
    security = Security(require_encryption=True, **given)
    for option, setting, name in TLS:
        path, typed = getattr(security, name), f"--{option.replace('_', '-')}"
        if path is None:
            raise UsageError(
                f"--scheduler {asked.scheduler} needs the certificate authority, a certificate and its key; "
                f"give {typed} FILE, or set {setting} in Dask's configuration"
            )
        if not Path(path).is_file():
            raise UsageError(
                f"there is no file {path} for {typed} ({setting}); give the PEM file that the cluster uses"
            )
    try:
        security.get_connection_args("client")
    except OSError as error:
        raise UsageError(f"the TLS files for {asked.scheduler} cannot be used: {error}; expected PEM files") from error
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
