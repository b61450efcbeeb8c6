from __future__ import annotations

import pytest

from miles.utils.file_errors import named_errors


def test_an_error_without_a_file_gets_one_and_keeps_its_kind() -> None:
    with pytest.raises(PermissionError, match=r"Operation not permitted: 'a\.txt'"), named_errors("a.txt"):
        raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "b.txt"), OSError("said otherwise")])
def test_other_errors_stay_as_they_are(error: OSError) -> None:
    with pytest.raises(OSError) as raised, named_errors("a.txt"):
        raise error
    assert raised.value is error
