"""MariaDB, where its server is installed: the same promises, with the guard of the fence alone."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from services import Services

from tests.helpers import wait_until

ROOT = Path(__file__).parents[1]

PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
SERVER = shutil.which("mariadbd", path=PLACES)
INSTALLER = shutil.which("mariadb-install-db", path=PLACES)

pytestmark = pytest.mark.skipif(not (SERVER and INSTALLER), reason="there is no MariaDB server")


@pytest.fixture
def socket() -> Iterator[Path]:
    """Yield the socket of a MariaDB of this test's own, with an empty database."""
    user = ["--user=root"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="mariadb-") as folder:
        data, found = Path(folder) / "data", Path(folder) / "s"
        options = ["--no-defaults", f"--datadir={data}", *user]
        subprocess.run(
            [str(INSTALLER), *options, "--auth-root-authentication-method=normal"],
            check=True,
            capture_output=True,
        )
        server = subprocess.Popen(
            [str(SERVER), *options, f"--socket={found}", "--skip-networking"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: found.exists() or server.poll() is not None)
            assert server.poll() is None
            yield found
        finally:
            server.terminate()
            server.wait(20)


def test_the_protocol_the_guard_and_once(socket: Path, private_services: Services) -> None:
    """Locks, late writes, the fence that never goes down, once, ledger, doctor and prune."""
    import pymysql

    with pymysql.connect(unix_socket=str(socket), user="root") as connection:
        connection.cursor().execute("CREATE DATABASE fencing CHARACTER SET utf8mb4")
    paths = [str(ROOT), str(ROOT / "example_project")]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "REDIS_URL": private_services.redis_url,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.mariadb_round", str(socket)],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("well done\n")
