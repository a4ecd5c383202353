"""Which keys the admin API takes: the configured ones, or one that the gateway keeps in a file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from kvroute.app.config import Config
from kvroute.gateway.access import AdminKeys
from kvroute.gateway.key_file import kept_key, key_lines, key_path, user_state_folder

log = logging.getLogger("kvroute.server")


class AdminAccess:
    """`keys` are those of `config`; without any, `listens_on` adds the one in the port's key file.

    Mutable: by `listens_on`, before the gateway takes requests on that port.
    """

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.keys = AdminKeys(config.admin.keys)
        self._config = config
        self._environ = environ
        self._is_configured = bool(config.admin.keys)
        self._files: dict[int, Path] = {}
        self._is_logged = False

    def listens_on(self, port: int) -> None:
        """The gateway listens on `port`, or is about to. Logs where the key is, once for each file.

        Raises ConfigError where a key is needed and cannot be kept. Blocks: call it at the start only.
        """
        if self._is_configured:
            if not self._is_logged:
                self._is_logged = True
                file = self._config.admin.api_key_file
                where = (
                    "the configured one (admin.api_key)"
                    if file is None
                    else f"in {file} (admin.api_key_file)"
                )
                log.info("the admin key is %s", where)
            return
        if port in self._files:
            return
        path = key_path(self._folder(), port)
        self.keys.add(key_lines(kept_key(path)))
        self._files[port] = path
        log.info("the admin key is in %s", path)

    def close(self) -> None:
        """Remove the files of ports that the system has chosen: nobody will listen there again."""
        if self._config.server.port == 0:
            for path in self._files.values():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _folder(self) -> Path:
        folder = self._config.server.state_dir
        return folder.absolute() if folder is not None else user_state_folder(self._environ)
