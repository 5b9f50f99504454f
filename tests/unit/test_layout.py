"""The flat vector's layout: aligned, in order, and told apart by its digest."""

from __future__ import annotations

import itertools

import pytest

from protocol.layout import ALIGNMENT, align, build_layout

MODEL = [("embedding", (10, 64)), ("norm", (3,)), ("scalar", ()), ("head", (256,))]


def test_tensors_lie_in_order_on_boundaries_and_the_segments_are_whole() -> None:
    layout = build_layout(MODEL, [("mean", (5,)), ("variance", (257,))])
    entries = layout.parameters + layout.buffers
    assert [entry.name for entry in entries] == ["embedding", "norm", "scalar", "head", "mean", "variance"]
    assert [entry.offset for entry in entries] == [0, 768, 1024, 1280, 1536, 1792]
    assert [entry.elements for entry in entries] == [640, 3, 1, 256, 5, 257]
    for entry, following in itertools.pairwise(entries):
        assert following.offset == align(entry.stop)
    assert layout.parameter_elements == 1536
    assert layout.buffer_elements == 256 + 512
    assert layout.elements == 1536 + 768
    assert layout.elements % ALIGNMENT == 0


def test_a_model_without_buffers_has_an_empty_second_segment() -> None:
    layout = build_layout(MODEL)
    assert layout.buffers == ()
    assert (layout.buffer_elements, layout.elements) == (0, 1536)


def test_the_digest_sees_names_shapes_order_and_segments() -> None:
    same = build_layout(MODEL).digest()
    assert build_layout(list(MODEL)).digest() == same
    others = [
        build_layout([("embeddings", (10, 64)), *MODEL[1:]]),
        build_layout([("embedding", (64, 10)), *MODEL[1:]]),
        build_layout([MODEL[1], MODEL[0], *MODEL[2:]]),
        build_layout(MODEL[:-1], MODEL[-1:]),
        build_layout(MODEL[:-1]),
    ]
    assert len({same, *(layout.digest() for layout in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("parameters", "buffers", "words"),
    [
        ([("a", (1,)), ("a", (2,))], [], "'a' occurs twice"),
        ([("a", (1,))], [("a", (2,))], "'a' occurs twice"),
        ([("a", (2, -1))], [], "dimensions must not be negative"),
        ([], [("a", (2,))], "no trained floating-point parameters"),
        ([("a", (0, 5))], [], "no trained floating-point parameters"),
    ],
)
def test_models_that_have_no_layout_are_refused(parameters: list, buffers: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_layout(parameters, buffers)
