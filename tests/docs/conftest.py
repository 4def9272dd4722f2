"""Pages show how to register a class for this process; the next test must not find it."""

import pytest

from kvtier import registry


@pytest.fixture(autouse=True)
def registered_for_this_page_only(monkeypatch):
    for kind in (registry.backends, registry.codecs, registry.policies):
        monkeypatch.setattr(kind, "_registered", dict(kind._registered))
