"""`serve`: run a pool in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from coordinator.cli.options import Settings
from tinkerpool.cli import show
from tinkerpool.cli.errors import CliError

_log = logging.getLogger(__name__)


def serve(settings: Settings, _arguments: Sequence[str]) -> None:
    """Run the pool until a signal stops it. Raises CliError if it cannot start, or fails."""
    from coordinator.server import Server, StartError
    from workers.pool.factory import make_pool

    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config, pool = settings.server, settings.pool
    names = ", ".join(model.name for model in pool.models)
    workers = f"{pool.num_workers} worker{'s' if pool.num_workers > 1 else ''}"
    show.say(f"Starting a pool: {names}; {workers} ({pool.kind}); data in {config.coordinator.data_dir}")
    try:
        asyncio.run(Server(config, make_pool(pool), show.say).run())
    except StartError as error:
        _log.debug("the pool did not start", exc_info=error)
        raise CliError(str(error)) from None
    except Exception as error:  # noqa: BLE001  # every failure ends here: logged, and shown as one sentence
        _log.error("the pool failed", exc_info=error)
        raise CliError(f"the pool failed; acknowledged operations are kept: {type(error).__name__}: {error}") from None
