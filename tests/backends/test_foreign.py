"""The tables that turn foreign exceptions into ours."""

import errno

import pytest

from kvtier.backends.foreign import COMMON, translate, translated
from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, CapacityError, ClosedError

OWN = {errno.EIO: CapacityError, ZeroDivisionError: BackendTimeoutError, ArithmeticError: CapacityError}


@pytest.mark.parametrize(
    ("exc", "table", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), COMMON, CapacityError),
        (OSError(errno.EIO, "io"), COMMON, BackendUnavailableError),
        (OSError(errno.EIO, "io"), OWN, CapacityError),
        (OSError(errno.ENOSPC, "full"), OWN, CapacityError),
        (OSError("no number"), OWN, BackendUnavailableError),
        (TimeoutError(), COMMON, BackendTimeoutError),
        (ZeroDivisionError(), OWN, BackendTimeoutError),
        (OverflowError(), OWN, CapacityError),
        (MemoryError(), OWN, CapacityError),
    ],
)
def test_table_decides(exc, table, kind):
    ours = translated(exc, table, medium="the medium")
    assert type(ours) is kind
    assert str(ours).startswith("the medium: ")
    assert str(exc) in str(ours)
    with pytest.raises(kind) as caught, translate(table, medium="the medium"):
        raise exc
    assert caught.value.__cause__ is exc


def test_bugs_and_our_own_errors_pass():
    assert translated(TypeError("a bug"), OWN, medium="m") is None
    own = BackendUnavailableError("ours")
    assert translated(own, OWN, medium="m") is own
    for exc in (TypeError("a bug"), own, ClosedError("closed"), BackendError("b")):
        with pytest.raises(type(exc)) as caught, translate(OWN, medium="m"):
            raise exc
        assert caught.value is exc


def test_text_is_never_empty():
    assert str(translated(TimeoutError(), COMMON, medium="m")) == "m: TimeoutError"
