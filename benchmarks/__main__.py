"""Print the table. Start the servers, on loopback, unless DATABASE_URL and REDIS_URL name some."""

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "example_project"))

from services import Services


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    with ExitStack() as servers:
        if not (os.environ.get("DATABASE_URL") and os.environ.get("REDIS_URL")):
            port = free_port()
            args = ["--bind", "127.0.0.1", "--port", str(port)]
            running = servers.enter_context(Services(valkey_args=args))
            os.environ.setdefault("DATABASE_URL", running.database_url)
            os.environ.setdefault("REDIS_URL", f"redis://127.0.0.1:{port}/0")
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        report()


def report() -> None:
    from django.core.management import call_command

    from benchmarks import measures  # after the settings are named
    from benchmarks.contestants import CONTESTANTS, client

    call_command("migrate", run_syncdb=True, verbosity=0)
    info = client().info("server")
    version = info.get("valkey_version") or info["redis_version"]
    print(f"Python {sys.version.split()[0]}, server {version}, {os.cpu_count()} cores\n")

    print("acquire + release of a free lock, as a multiple of two bare round trips")
    for kind, ratio in measures.round_trips().items():
        print(f"  {kind:30} {ratio:8.2f}")

    print("read, modify, write of a row, as a multiple of that under redis-py's lock")
    for kind, ratio in measures.read_modify_write().items():
        print(f"  {kind:30} {ratio:8.2f}")

    print("from a release to the grant in a waiting process, median and p99 in ms")
    for kind in CONTESTANTS:
        median, high = measures.hand_off(kind, 60 if kind == "redis-py" else 300)
        print(f"  {kind:30} {median:8.2f} {high:8.2f}")

    print("commands per waiter and second")
    for kind in CONTESTANTS:
        print(f"  {kind:30} {measures.commands_of_waiters(kind, 5, 4):8.2f}")

    print("8 processes want one lock for 5 s, each has it for 1 ms: most and least served")
    for kind in CONTESTANTS:
        most, *_, least = measures.served(kind, 8, 5)
        ratio = f"{most / least:.2f}" if least else "∞"
        print(f"  {kind:30} {most:8} {least:8} {ratio:>8}")


if __name__ == "__main__":
    main()
