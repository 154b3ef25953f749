"""Records that notebooks show. How is up to the report, which this part of the package does not import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A record that a notebook shows as the report page does, once `lightning_memguard.report.page` is loaded."""

    html_of: ClassVar[Callable[[Any], str] | None] = None

    def _repr_html_(self) -> str | None:  # None: as text
        return Shown.html_of(self) if Shown.html_of else None
