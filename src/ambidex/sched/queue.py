"""`RequestQueues`: who waits, who runs, and in which order.

    add ──▶ waiting ── start (the first only) ──▶ running ── remove ──▶
            yielded ◀── requeue (the last only) ──┘  ▲
               └────────── start, before all others ─┘

`FairQueue` orders those that wait. Who has started keeps its place for ever: running requests are kept in the order in
which they started, and one that had to yield goes before all that have not started.
"""

from collections import OrderedDict
from collections.abc import Iterator

from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, RequestStatus
from ambidex.sched.entry import Entry
from ambidex.sched.fairness import FairQueue


class RequestQueues:
    """Waiting, yielded and running requests."""

    def __init__(self) -> None:
        self._waiting = FairQueue()
        self._yielded: OrderedDict[RequestId, Entry] = OrderedDict()
        self._running: OrderedDict[RequestId, Entry] = OrderedDict()
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait, also those that had to yield."""
        return len(self._waiting) + len(self._yielded)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def first_waiting(self) -> Entry | None:
        """The request that may start next."""
        return next(iter(self._yielded.values()), None) or self._waiting.first

    @property
    def last_running(self) -> Entry | None:
        """The running request that started last: the first to yield."""
        return next(reversed(self._running.values()), None)

    def running(self) -> Iterator[Entry]:
        """A snapshot of the running requests, first started first."""
        return iter(tuple(self._running.values()))

    def find(self, request_id: RequestId) -> Entry | None:
        """The waiting or running request of that name, if any."""
        return self._running.get(request_id) or self._yielded.get(request_id) or self._waiting.find(request_id)

    def add(self, request: Request) -> Entry:
        """Put a request among those that wait."""
        entry = Entry(request, arrival=self._num_arrived)
        self._num_arrived += 1
        self._waiting.add(entry)
        return entry

    def start(self, entry: Entry) -> None:
        """The first of the waiting requests becomes the last of the running ones."""
        if entry is not self.first_waiting:
            raise InternalError(f"request {entry.request_id} starts out of turn")
        if entry.request_id in self._yielded:
            del self._yielded[entry.request_id]
        else:
            self._waiting.start(entry)
        self._running[entry.request_id] = entry
        entry.request.status = RequestStatus.RUNNING

    def requeue(self, entry: Entry) -> None:
        """The last of the running requests becomes the first of those that wait."""
        if entry is not self.last_running:
            raise InternalError(f"request {entry.request_id} yields out of turn")
        del self._running[entry.request_id]
        self._yielded[entry.request_id] = entry
        self._yielded.move_to_end(entry.request_id, last=False)
        entry.request.status = RequestStatus.WAITING

    def remove(self, entry: Entry) -> None:
        """Forget a request, wherever it is."""
        if self.find(entry.request_id) is not entry:
            raise InternalError(f"request {entry.request_id} is in no queue")
        for queue in (self._running, self._yielded):
            if queue.pop(entry.request_id, None) is not None:
                break
        else:
            self._waiting.remove(entry)
        entry.request.status = RequestStatus.FINISHED

    def charge(self, entry: Entry, num_tokens: int) -> None:
        """Tokens have been computed or generated for the tenant of a request."""
        self._waiting.charge(entry.request.tenant, num_tokens)

    def num_served(self, tenant: str) -> int:
        """Tokens that count as served to a tenant."""
        return self._waiting.num_served(tenant)
