import pytest
from hypothesis import settings

from kvtier.testing.containers import SAMPLES

settings.register_profile("no-deadline", deadline=None)  # nothing here asserts wall time
settings.load_profile("no-deadline")


@pytest.fixture(params=SAMPLES.values(), ids=SAMPLES.keys())
def container(request):
    """One container of each kind."""
    return request.param()
