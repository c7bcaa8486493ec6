"""A machine, as its sessions see it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Place:
    """What a session has to know of its machine."""

    name: str
    address: str
    keys: tuple[str, str]
    has_cuda: bool
    gpus: list[str]
    #: Where copies of projects are.
    projects: Path

    def project_of(self, project_id: str) -> str:
        """Where a project is here; "" where it is not known by an id."""
        if not project_id:
            return ""
        directory = self.projects / hashlib.blake2b(project_id.encode(), digest_size=16).hexdigest()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(directory)
