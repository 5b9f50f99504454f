"""Rounds of this and other engines over one wide-area lab, in one run: `scripts/bench_round --help`."""
