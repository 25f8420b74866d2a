"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM files."""

    cert: str
    key: str

    def replace_by(self, other: Issued) -> None:
        """Renames the new files over the old ones, as an operator would."""
        for old, new in ((self.cert, other.cert), (self.key, other.key)):
            replace(old, new)


class Authority:
    """Signs certificates; its own is in `ca`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._numbers = count()
        self.ca = str(directory / f"{name}.pem")
        self._key = str(directory / f"{name}.key")
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca),
            *("-subj", f"/CN={name}", "-days", "2"),
        )

    def issue(self, name: str, *alternative_names: str) -> Issued:
        """Issues a certificate for `DNS:...` and `IP:...` names, in files of its own: a process may
        still be reading those of an earlier call."""
        base = self._directory / f"{self._name}-{name}-{next(self._numbers)}"
        request, extensions = base.with_suffix(".csr"), base.with_suffix(".ext")
        issued = Issued(f"{base}.pem", f"{base}.key")
        extensions.write_text(f"subjectAltName={','.join(alternative_names)}")
        _openssl("req", *_NEW_KEY, "-keyout", issued.key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", issued.cert),
        )
        return issued


def replace(old: str, new: str) -> None:
    """Replaces the contents of `old` with those of `new`, atomically."""
    temporary = Path(f"{old}.new")
    temporary.write_bytes(Path(new).read_bytes())
    temporary.replace(old)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
