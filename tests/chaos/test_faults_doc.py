"""docs/faults.md is what its rows and its record make of it: neither is changed without the other."""

from __future__ import annotations

from tests.chaos.results import DOCUMENT, document, recorded
from tests.chaos.rows import rows


def test_the_document_is_made_of_the_rows_and_the_record() -> None:
    assert DOCUMENT.read_text() == document(rows(), recorded()), "run `scripts/chaos --record` to make it anew"
