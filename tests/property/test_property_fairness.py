"""The order of starts under random crowds: tenants that always wait get the same, and nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.core.ids import RequestId
from ambidex.core.request import MAX_PRIORITY, Request, SamplingParams
from ambidex.sched.entry import Entry
from ambidex.sched.fairness import MAX_OVERTAKES, FairQueue

SIZES = st.tuples(st.integers(1, 30), st.integers(0, 30))
"""Tokens of a prompt, and of its answer."""


class Crowd:
    """A queue, and the answers that are still being generated."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.num_arrived = 0
        self.served: dict[str, int] = {}
        self.running: list[tuple[str, int]] = []

    def add(self, tenant: str, priority: int, num_prompt: int) -> Entry:
        request = Request(
            request_id=RequestId(str(self.num_arrived)), prompt_token_ids=(5,) * num_prompt, params=SamplingParams(),
            max_total_tokens=100, tenant=tenant, priority=priority,
        )  # fmt: skip
        entry = Entry(request, arrival=self.num_arrived)
        self.num_arrived += 1
        self.queue.add(entry)
        return entry

    def charge(self, tenant: str, num_tokens: int) -> None:
        self.queue.charge(tenant, num_tokens)
        self.served[tenant] = self.served.get(tenant, 0) + num_tokens

    def start(self, num_output: int) -> Entry:
        entry = self.queue.first
        assert entry is not None
        self.queue.start(entry)
        self.charge(entry.request.tenant, len(entry.request.prompt_token_ids))
        self.running.append((entry.request.tenant, num_output))
        return entry

    def finish_first(self) -> None:
        tenant, num_output = self.running.pop(0)
        self.charge(tenant, num_output)


@settings(max_examples=100, deadline=None)
@given(
    num_tenants=st.integers(2, 4),
    max_running=st.integers(1, 4),
    sizes=st.lists(SIZES, min_size=40, max_size=120),
    data=st.data(),
)
def test_tenants_that_always_wait_differ_by_a_prompt_and_the_running_answers(
    num_tenants: int, max_running: int, sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    crowd, tenants = Crowd(), [str(number) for number in range(num_tenants)]
    for tenant in tenants * 2:
        crowd.add(tenant, 0, 5)
    for num_prompt, num_output in sizes:
        if len(crowd.running) == max_running:
            crowd.finish_first()
        tenant = crowd.start(num_output).request.tenant
        crowd.add(tenant, data.draw(st.integers(-2, 2)), num_prompt)  # so that it always waits
        bound = 30 + 30 * max_running
        assert max(crowd.served.values()) - min(crowd.served.get(each, 0) for each in tenants) <= bound


@settings(max_examples=60, deadline=None)
@given(
    crowd_before=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 30)), max_size=10),
    arrivals=st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
    tenant=st.sampled_from("abc"),
)
def test_least_urgent_request_starts_whatever_keeps_coming(
    crowd_before: list[tuple[str, int, int]], arrivals: list[str], tenant: str
) -> None:
    crowd = Crowd()
    for other, priority, num_prompt in crowd_before:
        crowd.add(other, priority, num_prompt)
    patient = crowd.add(tenant, MAX_PRIORITY, 1)
    # Its tenant is served at least once in so many starts, by tokens; and it is passed over a limited number of times
    # for each request of its tenant that is older.
    limit = 3 * 30 * (MAX_OVERTAKES + 1) * (len(crowd_before) + 1)
    for _ in range(limit):
        for other in arrivals:
            crowd.add(other, -MAX_PRIORITY, 1)
        if crowd.start(0) is patient:
            return
    raise AssertionError(f"it has not started after {limit} others")
