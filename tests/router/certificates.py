"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY_KIND = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `ca` is the file that others trust it by."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def certificate(self, *names: str) -> Path:
        """One file with key and certificate, for e.g. DNS:localhost or IP:127.0.0.1."""
        stem = self.folder / "-".join(name.partition(":")[2] for name in names)
        key, request, cert = (stem.with_suffix(kind) for kind in (".key", ".csr", ".crt"))
        extensions = stem.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={','.join(names)}\nkeyUsage=digitalSignature\n")
        _openssl("req", *_KEY_KIND, "-keyout", key, "-out", request, "-subj", "/CN=test")
        signer = ("-CA", self.ca, "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signer, "-days", "2", "-extfile", extensions, "-out", cert)
        both = stem.with_suffix(".pem")
        both.write_bytes(key.read_bytes() + cert.read_bytes())
        return both


def new_authority(folder: Path) -> Authority:
    made = Authority(folder)
    about = ("-subj", "/CN=test authority", "-addext", "keyUsage=critical,keyCertSign", "-days", "2")
    _openssl("req", "-x509", *_KEY_KIND, "-keyout", folder / "ca.key", "-out", made.ca, *about)
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
