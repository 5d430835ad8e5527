"""`RequestQueues`: who waits and who runs, both in the order of arrival.

    add ──▶ waiting ── start (the first only) ──▶ running ── remove ──▶
                ▲                                    │
                └──── requeue (the last only) ◀──────┘

So whoever runs arrived before whoever waits; first come, first served.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, RequestStatus
from ambidex.kv.block_keys import BlockKeys
from ambidex.kv.lease import KVLease


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the scheduler's hands. `lease` is there while it runs."""

    request: Request
    arrival: int
    """Number in the order of arrival, from 0."""
    lease: KVLease | None = None
    keys: BlockKeys | None = None
    """Names of its full blocks; None: there is no prefix cache."""
    is_announced: bool = False
    """The executor has been told of it."""

    @property
    def request_id(self) -> RequestId:
        """Identity of the request."""
        return self.request.request_id


class RequestQueues:
    """Waiting and running requests."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[RequestId, Entry] = OrderedDict()
        self._running: OrderedDict[RequestId, Entry] = OrderedDict()
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def first_waiting(self) -> Entry | None:
        """The request that may start next."""
        return next(iter(self._waiting.values()), None)

    @property
    def last_running(self) -> Entry | None:
        """The running request that arrived last: the first to yield."""
        return next(reversed(self._running.values()), None)

    def running(self) -> Iterator[Entry]:
        """A snapshot of the running requests, first arrived first."""
        return iter(tuple(self._running.values()))

    def find(self, request_id: RequestId) -> Entry | None:
        """The waiting or running request of that name, if any."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def add(self, request: Request) -> Entry:
        """Append a request to those that wait."""
        entry = Entry(request, arrival=self._num_arrived)
        self._num_arrived += 1
        self._waiting[entry.request_id] = entry
        return entry

    def start(self, entry: Entry) -> None:
        """The first of the waiting requests becomes the last of the running ones."""
        if entry is not self.first_waiting:
            raise InternalError(f"request {entry.request_id} starts out of turn")
        del self._waiting[entry.request_id]
        self._running[entry.request_id] = entry
        entry.request.status = RequestStatus.RUNNING

    def requeue(self, entry: Entry) -> None:
        """The last of the running requests becomes the first of the waiting ones."""
        if entry is not self.last_running:
            raise InternalError(f"request {entry.request_id} yields out of turn")
        del self._running[entry.request_id]
        self._waiting[entry.request_id] = entry
        self._waiting.move_to_end(entry.request_id, last=False)
        entry.request.status = RequestStatus.WAITING

    def remove(self, entry: Entry) -> None:
        """Forget a request, wherever it is."""
        queue = self._running if entry.request_id in self._running else self._waiting
        if queue.get(entry.request_id) is not entry:
            raise InternalError(f"request {entry.request_id} is in no queue")
        del queue[entry.request_id]
        entry.request.status = RequestStatus.FINISHED
