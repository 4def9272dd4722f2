"""What a check found: how bad it is, where, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found.

    Attributes:
        level: "ok"; "note", worth knowing; "warning", works but probably not as meant; "problem", does not work.
        check: a fixed word for the kind, for programs.
        text: what is the case.
        fix: what to change; "" where there is nothing to do.
        tier: the tier it is about; None for the config as a whole.
    """

    level: Level
    check: str
    text: str
    fix: str = ""
    tier: str | None = None
