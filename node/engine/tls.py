"""TLS 1.3 contexts of the data channels. Certificates are self-signed: who holds one is said by the signed membership
record that carries its fingerprint, so no authority is asked (design section 8)."""

from __future__ import annotations

import os
import ssl

ALPN = "atoll-data/1"
PROBE_ALPN = "atoll-probe/1"
"""Of who only looks whether this engine can be dialled, and hangs up."""


def server_context(certificate_pem: bytes, key_pem: bytes) -> ssl.SSLContext:
    """Raises `ssl.SSLError` when the pair does not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN, PROBE_ALPN])
    context.num_tickets = 0
    # The standard library loads certificates from paths only; a memfd keeps the key off the disk.
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(certificate_pem + b"\n" + key_pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def client_context(protocol: str = ALPN) -> ssl.SSLContext:
    """Verifies nothing by itself: the caller compares the certificate's SHA-256 with the membership record's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([protocol])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
