import gc
import logging
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent.parent)
if TESTS not in sys.path:  # the simulation is a package of its own: `PYTHONPATH=tests python -m simulation`
    sys.path.insert(0, TESTS)


@pytest.fixture(autouse=True)
def _quick(caplog):
    """Thousands of scenarios, each with its faults: no log records, and modules out of the collector's sight."""
    caplog.set_level(logging.CRITICAL, logger="kvtier")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
