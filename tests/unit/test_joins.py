"""When a rise of the validation loss counts as a spike that joiners made (`scripts/joins`)."""

from __future__ import annotations

from scripts.joins import AFTER_ROUNDS, Compared, Line, table

JOINED_AT = 10
FALLING = [5.0 - 0.05 * number for number in range(24)]


def lines(losses: list[float], *, joiners_from: int | None = None) -> tuple[Line, ...]:
    return tuple(
        Line(round=number, loss=loss, contributors=2 if joiners_from is None or number < joiners_from else 4)
        for number, loss in enumerate(losses)
    )


def compared(with_joins: list[float], without: list[float] = FALLING) -> Compared:
    joined = lines(with_joins, joiners_from=JOINED_AT)
    return Compared(alone=lines(without), joined=joined, first_counted=JOINED_AT)


def bent(places: dict[int, float], losses: list[float] = FALLING) -> list[float]:
    return [loss + places.get(number, 0.0) for number, loss in enumerate(losses)]


def test_a_loss_that_falls_has_no_spike() -> None:
    assert not compared(FALLING).spike


def test_a_rise_at_the_first_rounds_of_joiners_is_one() -> None:
    for number in (JOINED_AT, JOINED_AT + AFTER_ROUNDS):
        assert compared(bent({number: 0.2})).spike


def test_a_rise_as_there_are_without_joiners_is_none() -> None:
    assert not compared(bent({JOINED_AT: 0.2}), bent({5: 0.2})).spike
    assert not compared(bent({4: 0.2, JOINED_AT: 0.2})).spike


def test_what_comes_later_is_not_the_joiners_doing() -> None:
    assert not compared(bent({JOINED_AT + AFTER_ROUNDS + 3: 0.5})).spike


def test_the_table_names_the_round_of_the_first_joiner() -> None:
    rows = table(compared(FALLING)).splitlines()
    assert len(rows) == 2 + len(FALLING)
    assert rows[2 + JOINED_AT] == "| 10 | 4.5000 | 4.5000 | 4 (first joiner) |"
