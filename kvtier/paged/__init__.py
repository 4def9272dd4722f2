"""KV in an engine's blocks: gathered into chunks and scattered from them, by block table or slot mapping."""

from kvtier.paged.exchange import PagedSource, PagedTarget
from kvtier.paged.group import PagedGroup
from kvtier.paged.layout import PagedLayout

__all__ = ["PagedGroup", "PagedLayout", "PagedSource", "PagedTarget"]
