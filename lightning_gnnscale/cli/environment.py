"""Settings that read environment variables: their values are used but never written or printed."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from .. import events
from .errors import UsageError

_NAMES = ("name", "dataset.name")  # of folders
_read: dict[str, str] = {}  # value to the reference that has read it
_as_written = False


def _env(key: str, *default: Any) -> Any:
    """Resolve ${oc.env:NAME} and ${oc.env:NAME,default}; while a config is written, to the reference itself."""
    text = ",".join([str(key), *("null" if one is None else str(one) for one in default)])
    reference = f"${{oc.env:{text}}}"
    if _as_written:
        return reference
    value = oc.env(key, *default)
    if isinstance(value, str) and os.environ.get(key) == value:
        _read[value] = reference
        events.hide(key, reference)
    return value


OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def written(config: DictConfig) -> dict[str, Any]:
    """Return a config as resolved plain values; references to environment variables stay references."""
    with _references():
        return OmegaConf.to_container(config, resolve=True)


def hidden(value: Any) -> Any:
    """Return text, or plain values of a summary, with references instead of environment variables' values."""
    return events.replaced(value, _read)


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuse references to environment variables in settings that name folders.

    Args:
        settings: Values by dotted name, as they are written.

    Raises:
        UsageError: names the setting.
    """
    for name in _NAMES:
        if "oc.env" in str(settings.get(name, "")):
            raise UsageError(
                f"{name} names folders and appears in reports, and values of environment variables are kept out of "
                f"them: say {name}= itself; a shell fills in $NAME"
            )


@contextmanager
def _references() -> Iterator[None]:
    global _as_written
    _as_written = True
    try:
        yield
    finally:
        _as_written = False
