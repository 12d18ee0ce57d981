"""The timeline: what happened when, to whom, with which token."""

import time
from collections.abc import Callable

from hoa.demo.replicas import Event, Replica

Write = Callable[[str], object]

TEXTS = {
    "month_not_run": "has the lock, finds {month} not charged yet, asks the meters",
    "month_charged": "has written and committed the charges of {month}",
    "logged": "logs {text}",
}


class Timeline:
    """Write one line per event. The clock is monotonic and the same in every process."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._start = time.monotonic()
        self._write("seconds  who                    token  what")

    def demo(self, text: str) -> None:
        """Add what the demo itself does."""
        self._add(time.monotonic(), "demo", "", text)

    def replica(self, replica: Replica, event: Event) -> None:
        """Add what a replica tells."""
        token = event.get("token", "")
        self._add(event["at"], str(replica), "none" if token == 0 else str(token), text_of(event))

    def _add(self, at: float, who: str, token: str, text: str) -> None:
        self._write(f"{at - self._start:7.2f}  {who:<22} {token:>5}  {text}")


def text_of(event: Event) -> str:
    if event["step"] != "ended":
        return TEXTS[event["step"]].format_map(event)
    if event["text"]:
        return f"ends with {event['ending']}: {event['text']}"
    return f"ends: {event['ending']}"
