"""manage.py be_interrupted: run a command again and again, and send it a signal each time."""

import gc
import json
import random
import signal
import threading
import time
import uuid
import warnings
from collections import Counter as Tally
from concurrent.futures import Future, ThreadPoolExecutor
from io import StringIO
from typing import Any

from django.core.cache import caches
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser

from django_fencing.decorators import with_fenced_lock
from django_fencing.locks import fenced_atomic
from tests.helpers import SECONDS, acquired, keys_of

MAIN = threading.main_thread()

# One thread each for all rounds: where one ends, a finalizer runs in the main thread, and an
# exception that a signal raises in there is lost.
SENDER, HOLDER = ThreadPoolExecutor(1), ThreadPoolExecutor(1)


class Command(BaseCommand):
    requires_system_checks = ()  # they would take longer than the work

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("signal")
        parser.add_argument("--rounds", type=int)
        parser.add_argument("--held", action="store_true", help="By somebody else: it waits.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Write how many rounds ended in which way."""
        # redis-py makes a socket in one step and keeps it in another; the garbage collector closes
        # one that was interrupted in between.
        warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
        number = signal.Signals[options["signal"]]
        play = waiting if options["held"] else working
        with fenced_atomic(uuid.uuid4().hex):  # everything is connected and loaded
            pass
        ends = Tally(play(number, uuid.uuid4().hex) for _ in range(options["rounds"]))
        self.stdout.write(json.dumps(ends))


def working(number: signal.Signals, name: str) -> str:
    """Interrupt a command that acquires, or has just begun to work."""
    end = interrupted(number, name)
    cache: Any = caches["default"]
    if cache.client.get_client().exists(keys_of(name).lease):
        end += ", and the lease is left"
    with fenced_atomic(name):  # neither Redis nor the database is in disorder
        return end


def waiting(number: signal.Signals, name: str) -> str:
    """Interrupt a command that waits for a lock, which another flow holds."""
    lease = HOLDER.submit(acquired, name).result()
    end = interrupted(number, name)
    with fenced_atomic(f"{name}:other"):
        lease.ensure_held()
    if not lease.release():
        end += ", and the holder has lost its lease"
    return end


def interrupted(number: signal.Signals, name: str) -> str:
    """Run a command, and return how it ends."""
    # An acquisition takes about two milliseconds.
    delay = random.choice([random.uniform(0, 0.003), random.uniform(0, 0.02)])
    sent: list[Future[None]] = []

    def send() -> None:
        time.sleep(delay)
        assert MAIN.ident
        signal.pthread_kill(MAIN.ident, number)

    def begin(*args: Any, **options: Any) -> str:
        sent.append(SENDER.submit(send))
        return name

    class Interrupted(BaseCommand):
        requires_system_checks = ()

        @with_fenced_lock(begin, wait=60)
        def handle(self, *args: Any, **options: Any) -> None:
            # A signal that comes just before a system call does not end it.
            for _ in range(100 * SECONDS):
                threading.Event().wait(0.01)

    gc.collect()
    gc.disable()  # its finalizers are such, too
    try:
        call_command(Interrupted(), stderr=StringIO())
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except SystemExit as stop:
        return f"SystemExit({stop.code})"
    except BaseException as error:  # noqa: BLE001 - it is told
        return repr(error)
    finally:
        for one in sent:
            one.result()
        gc.enable()
    return "nothing"
