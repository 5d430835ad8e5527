"""`FairQueue`: who starts next among those that have not started. A policy: it picks and does not act.

Tenants share by tokens: each has a counter of the tokens that were computed and generated for it, and the lowest goes
next. A tenant that comes back is lifted to the lowest of those that wait, so that nobody saves up by being away; one
that has had more keeps its count. So tenants that always wait differ by one prompt and the answers that run, at most.

Requests of one tenant go by priority, then by arrival; priorities say nothing to other tenants. The oldest is passed
over at most `MAX_OVERTAKES` times in a row, so each starts some day.

Source: virtual token counters, arXiv:2401.00588, with weight 1 for both kinds of tokens.
"""

import heapq
from collections import OrderedDict
from typing import Final

from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.sched.entry import Entry

MAX_OVERTAKES: Final = 64
"""Of one tenant's oldest request: more than a batch of urgent ones, few enough to be no end."""
_NUM_STALE: Final = 64
"""Left places that are kept beside as many as there are requests, before an order is swept."""


class TenantQueue:
    """Waiting requests of one tenant."""

    def __init__(self, num_served: int) -> None:
        self.num_served = num_served
        """Tokens computed and generated for it, or the count to which it was lifted."""
        self._by_arrival: OrderedDict[RequestId, Entry] = OrderedDict()
        self._by_priority: list[tuple[int, int, Entry]] = []
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    @property
    def first(self) -> Entry:
        """The request that goes next."""
        oldest = next(iter(self._by_arrival.values()))
        if self._num_overtakes >= MAX_OVERTAKES:
            return oldest
        while self._by_arrival.get(self._by_priority[0][2].request_id) is not self._by_priority[0][2]:
            heapq.heappop(self._by_priority)
        return self._by_priority[0][2]

    def add(self, entry: Entry) -> None:
        """Queue a request."""
        self._by_arrival[entry.request_id] = entry
        if len(self._by_priority) > 2 * len(self._by_arrival) + _NUM_STALE:
            self._by_priority = [(e.request.priority, e.arrival, e) for e in self._by_arrival.values()]
            heapq.heapify(self._by_priority)
        else:
            heapq.heappush(self._by_priority, (entry.request.priority, entry.arrival, entry))

    def start(self, entry: Entry) -> None:
        """The first request leaves to run."""
        is_oldest = entry is next(iter(self._by_arrival.values()))
        self._num_overtakes = 0 if is_oldest else self._num_overtakes + 1
        self._take(entry)

    def remove(self, entry: Entry) -> None:
        """A request ends without having run."""
        if entry is next(iter(self._by_arrival.values())):
            self._num_overtakes = 0
        self._take(entry)

    def _take(self, entry: Entry) -> None:
        del self._by_arrival[entry.request_id]
        if not self._by_arrival:
            self._by_priority.clear()


class FairQueue:
    """Waiting requests of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantQueue] = {}
        self._entries: dict[RequestId, Entry] = {}
        self._clock = 0  # count of the tenant that was served last, when it was

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> Entry | None:
        """The request that goes next; the same one until a request comes, goes or is charged for."""
        waiting = [tenant for tenant in self._tenants.values() if tenant]
        if not waiting:
            return None
        firsts = [(tenant.num_served, tenant.first) for tenant in waiting]
        return min(firsts, key=lambda item: (item[0], item[1].arrival))[1]

    def find(self, request_id: RequestId) -> Entry | None:
        """The waiting request of that name, if any."""
        return self._entries.get(request_id)

    def num_served(self, tenant: str) -> int:
        """Tokens that count as served to a tenant."""
        return self._tenants[tenant].num_served if tenant in self._tenants else self._clock

    def add(self, entry: Entry) -> None:
        """Queue a request behind those of its tenant that are as urgent."""
        tenant = self._tenants.setdefault(entry.request.tenant, TenantQueue(0))
        if not tenant:
            counts = [other.num_served for other in self._tenants.values() if other]
            tenant.num_served = max(tenant.num_served, min(counts, default=self._clock))
        tenant.add(entry)
        self._entries[entry.request_id] = entry

    def start(self, entry: Entry) -> None:
        """The first request leaves to run.

        Raises:
            InternalError: it is not the first.
        """
        if entry is not self.first:
            raise InternalError(f"request {entry.request_id} starts out of turn")
        tenant = self._tenants[entry.request.tenant]
        self._clock = max(self._clock, tenant.num_served)
        tenant.start(entry)
        del self._entries[entry.request_id]
        self._forget_idle()

    def remove(self, entry: Entry) -> None:
        """A waiting request ends."""
        del self._entries[entry.request_id]
        self._tenants[entry.request.tenant].remove(entry)
        self._forget_idle()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens have been computed or generated for a tenant."""
        queue = self._tenants.setdefault(tenant, TenantQueue(self._clock))
        queue.num_served += num_tokens

    def _forget_idle(self) -> None:
        """Tenants that have nothing to wait for and no more tokens than a newcomer are as good as new."""
        for name in [name for name, queue in self._tenants.items() if not queue and queue.num_served <= self._clock]:
            del self._tenants[name]
