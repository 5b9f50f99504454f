"""The operator's settings: flag, else `ATOLL_*`, else `config.toml` of the home, else the default."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from node.errors import OperatorError
from node.home import Home

ENVIRONMENT_PREFIX = "ATOLL_"
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kKMGT]i?)B?\s*$")
_SIZE_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: object) -> object:
    """`250MB` (decimal) or `250MiB` (binary) as bytes; numbers and everything else pass through to the type's check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError("write a size such as 250MB or 2GiB")
    number, unit = match.groups()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** _SIZE_POWER[unit[:1]])


def split_list(value: object) -> object:
    """What the environment has of a list: commas or blanks between its elements."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


class OperatorSettings(BaseSettings):
    """`node.settings.DaemonSettings` before the run is resolved; the docs of the fields are there."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    run: str | None = None
    """A preset, a TOML file, or the hex id of a run that this home has."""
    set: Words = ()
    """`KEY=VALUE` of the run's TOML, with `run`."""
    join: Words = ()
    listen: Words = ()
    announce: Words = ()
    announce_data: Words = ()
    data_port: int = Field(0, ge=0, le=65_535)
    http: str = "off"
    device: str = Field("auto", pattern=r"^(auto|cpu|none|cuda(:[0-9]+)?)$")
    max_rounds: int | None = Field(None, ge=1)
    name: str | None = Field(None, min_length=1, max_length=64)
    threads: int = Field(0, ge=0, le=4096)
    max_disk: Size = 0
    hivemind_python: str = ""
    max_relay: Size = 10_000_000
    allow_function: Words = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False

    @field_validator("http")
    @classmethod
    def _http_is_an_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value == "off" or (host and port.isascii() and port.isdigit() and int(port) < 65_536):
            return value
        raise ValueError("write HOST:PORT such as 127.0.0.1:8080, or off")

    @field_validator("name")
    @classmethod
    def _name_is_printable(cls, value: str | None) -> str | None:
        if value is not None and not value.isprintable():
            raise ValueError("use printable characters")
        return value


def resolve(home: Home, flags: Mapping[str, Any]) -> OperatorSettings:
    """`flags` holds only what was given on the command line. Raises `OperatorError`, one sentence."""

    class HomeSettings(OperatorSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = TomlConfigSettingsSource(settings_cls, toml_file=home.config_file)
            return init_settings, env_settings, file

    try:
        return HomeSettings(**dict(flags))
    except ValidationError as error:
        raise OperatorError(_sentence(error, home, flags)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"{home.config_file} is not valid TOML ({error}); correct it") from error
    except OSError as error:
        raise OperatorError(f"{home.config_file} cannot be read ({error.strerror}); make it readable") from error


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def _sentence(error: ValidationError, home: Home, flags: Mapping[str, Any]) -> str:
    """The first mistake, with where it was written."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = ", ".join(OperatorSettings.model_fields)
        return f"{home.config_file} has the unknown key {key!r}; remove it, or use one of {known}"
    if key in flags:
        where = flag_of(key)
    elif os.environ.get(ENVIRONMENT_PREFIX + key.upper()):
        where = ENVIRONMENT_PREFIX + key.upper()
    else:
        where = f"{key} in {home.config_file}"
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        why = "use auto, cpu, cuda, cuda:N or none"
    return f"{where} cannot be {first['input']!r}: {why[:1].lower()}{why[1:]}"
