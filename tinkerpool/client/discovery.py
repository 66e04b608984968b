"""Address and API key of a pool: from arguments, the environment, or the credentials file of this machine."""

from __future__ import annotations

import os

from tinkerpool.client.calls.transport import DEFAULT_PORT, parse_target
from tinkerpool.credentials import credentials_file, read_credentials
from tinkerpool.errors import ConfigurationError


def find_service(base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return address and key: each from its argument, else the environment, else the credentials file.

    A key from the file is sent only to the address in the file. Raises ConfigurationError if there is no key.
    """
    base_url = base_url or os.environ.get("TINKERPOOL_BASE_URL")
    api_key = api_key or os.environ.get("TINKERPOOL_API_KEY")
    if base_url and api_key:
        return base_url, api_key
    try:
        found = read_credentials()
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if not base_url:
        base_url = found.url if found else f"http://127.0.0.1:{DEFAULT_PORT}"
    if not api_key and found and parse_target(found.url) == parse_target(base_url):
        api_key = found.api_key
    if not api_key:
        raise ConfigurationError(
            f"no API key for {base_url}: pass api_key, set TINKERPOOL_API_KEY, or start a pool on this machine with "
            f"`tinkerpool up`, which leaves its key in {credentials_file()}"
        )
    return base_url, api_key
