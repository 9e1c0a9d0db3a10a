"""The table of README.md names tests that exist, has all rows, and is what fault_table.py writes."""

import fault_table
import pytest


def test_no_row_is_missing() -> None:
    assert [*fault_table.ROWS] == [*range(1, 37)]
    assert all(row.tests for row in fault_table.ROWS.values())


@pytest.mark.parametrize("number", fault_table.ROWS)
def test_each_test_that_a_row_names_is_there(number: int) -> None:
    for test in fault_table.ROWS[number].tests:
        file, _, name = test.partition("::")
        assert (fault_table.ROOT / "tests" / file).exists(), test
        assert name in fault_table.marks(file), test


def test_the_table_is_up_to_date() -> None:
    assert fault_table.README.read_text() == fault_table.written(), "python tests/system/faults/fault_table.py"
