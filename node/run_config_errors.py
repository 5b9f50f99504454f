"""pydantic's complaints as help: one sentence with the key, the value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}


def sentence(model: type[BaseModel], error: ValidationError) -> str:
    """The first complaint of `error` about values for `model`."""
    details = error.errors(include_url=False)
    # A misspelt key explains a missing one, so it is said first.
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    key = ".".join(str(part) for part in first["loc"])
    kind, value, context = first["type"], _shown(first["input"]), first.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model, first["loc"])
    if kind == "missing":
        return f"{key} is missing: add it"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{key} = {value} is out of bounds: set {words} {_number(context[name])}"
    if kind == "literal_error":
        return f"{key} = {value} is unknown: choose {context['expected']}"
    if kind in _TYPES:
        return f"{key} = {value} is not {_TYPES[kind]}: write one"
    if kind == "string_pattern_mismatch":
        return f"{key} = {value} has the wrong form: it must match {context['pattern']}"
    if kind in ("string_too_short", "string_too_long", "too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"{key} = {value} has the wrong length: the bound is {bound}"
    message = str(context.get("error", first["msg"]))
    return f"{key}: {message}" if key else message


def _unknown_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    inside: Any = model
    for part in location[:-1]:
        inside = _section(inside, str(part))
    wrong = str(location[-1])
    prefix = "".join(f"{part}." for part in location[:-1])
    known = list(inside.model_fields) if inside is not None else []
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if near:
        return f"{prefix}{wrong} is not a key: did you mean {prefix}{near[0]}"
    elsewhere = difflib.get_close_matches(wrong, list(_all_keys(model)), n=1, cutoff=0.8)
    if elsewhere:
        home = next(section for section in _all_keys(model)[elsewhere[0]])
        return f"{prefix}{wrong} is not a key: did you mean {home}{elsewhere[0]}"
    return f"{prefix}{wrong} is not a key: remove it, or use one of {', '.join(known)}"


def _section(model: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    if model is None or name not in model.model_fields:
        return None
    annotation = model.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys(model: type[BaseModel]) -> dict[str, list[str]]:
    """Each key of the sections → where it lives, as prefixes."""
    keys: dict[str, list[str]] = {}
    for name in model.model_fields:
        section = _section(model, name)
        for key in _fields(section):
            keys.setdefault(key, []).append(f"{name}.")
    return keys


def _fields(section: type[BaseModel] | None) -> Iterable[str]:
    return section.model_fields if section is not None else ()


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: object) -> str:
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 10_000 else str(value)
