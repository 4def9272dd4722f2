"""One conformance class per broken twin. Not collected by itself: `test_kit_catches_broken_twins.py` runs it apart."""

import pytest

from kvtier.testing import broken_backends, broken_lives, broken_powers
from kvtier.testing.backends import BackendConformance, JournalConformance, SlotConformance
from kvtier.testing.broken_backends import BrokenTwin
from kvtier.testing.broken_powers import BrokenJournal, BrokenSlots
from kvtier.testing.memory import DOWN


def twins_of(base):
    modules = (broken_backends, broken_lives, broken_powers)
    found = {name: cls for module in modules for name, cls in vars(module).items() if isinstance(cls, type)}
    return {name: cls for name, cls in found.items() if issubclass(cls, base) and cls is not base}


def on_shared_medium(twin):
    """Fixtures for a backend whose medium is a dict."""

    @pytest.fixture
    def medium(self):
        return {}

    @pytest.fixture
    def make_backend(self, medium):
        return lambda: twin(medium)

    @pytest.fixture
    def raw_read(self, medium):
        return lambda name: medium[name].value if name in medium else None

    @pytest.fixture
    def break_medium(self, medium):
        return lambda: medium.__setitem__(DOWN, None)

    @pytest.fixture
    def make_unopenable(self):
        return lambda: twin({DOWN: None})

    fixtures = (medium, make_backend, raw_read, break_medium, make_unopenable)
    return dict(zip(("medium", "make_backend", "raw_read", "break_medium", "make_unopenable"), fixtures, strict=True))


def on_the_arena(twin):
    @pytest.fixture
    def make_backend(self):
        return twin

    return {"make_backend": make_backend}


KINDS = (
    (BrokenTwin, BackendConformance, on_shared_medium),
    (BrokenSlots, SlotConformance, on_the_arena),
    (BrokenJournal, JournalConformance, on_shared_medium),
)
TWINS = {name: twin for base, _, _ in KINDS for name, twin in twins_of(base).items()}

for base, kit, fixtures in KINDS:
    for name, twin in twins_of(base).items():
        globals()[f"Test{name}"] = type(f"Test{name}", (kit,), {**fixtures(twin), "race_bytes": 1 << 20})
