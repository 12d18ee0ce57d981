"""The errors."""

import copy
import pickle
from uuid import uuid4

import pytest

from django_fencing import exceptions
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    InvalidResource,
    LeaseLost,
    LockHeld,
    NoSuchRow,
    OnceMismatch,
    StaleToken,
    StoreUnavailable,
    UnfencedWrite,
)

errors = [
    FencingError("said"),
    LockHeld("said", resource="r", retry_after=1.5, held_by="x"),
    LeaseLost("said", resource="r", token=4),
    StaleToken("said", resource="r", token=4, fence_token=5, fence_holder=uuid4()),
    StoreUnavailable("said", resource="r"),
    InvalidResource("said", resource="r"),
    NoSuchRow("said", resource="r"),
    InsideTransaction("said", resource="r"),
    UnfencedWrite("said", resource="r"),
    OnceMismatch("said", resource="r", key="k", token=4),
]


@pytest.mark.parametrize("error", errors, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickle_and_copy_with_its_attributes(error: FencingError) -> None:
    """A task queue sends errors between processes."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301
        assert type(again) is type(error)
        assert str(again) == "said"
        assert vars(again) == vars(error)


def test_the_tree_is_the_one_that_the_docstring_draws() -> None:
    """A stale token is a lost lease, and bad input is a ValueError."""
    defined = {name for name, value in vars(exceptions).items() if isinstance(value, type)}

    assert {type(error).__name__ for error in errors} == defined - {"UUID"}
    assert all(isinstance(error, FencingError) for error in errors)
    assert issubclass(StaleToken, LeaseLost)
    assert issubclass(InvalidResource, ValueError)
    assert issubclass(NoSuchRow, InvalidResource)
    for name in defined - {"UUID"}:
        assert name in (exceptions.__doc__ or "")
