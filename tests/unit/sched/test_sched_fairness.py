import pytest

from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, SamplingParams
from ambidex.sched.entry import Entry
from ambidex.sched.fairness import MAX_OVERTAKES, FairQueue


class Crowd:
    """A queue and those that stand in it."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.num_arrived = 0

    def add(self, tenant: str, priority: int = 0, *, num_prompt: int = 10) -> Entry:
        request = Request(
            request_id=RequestId(f"{tenant}{self.num_arrived}"),
            prompt_token_ids=(5,) * num_prompt,
            params=SamplingParams(),
            max_total_tokens=100,
            tenant=tenant,
            priority=priority,
        )
        entry = Entry(request, arrival=self.num_arrived)
        self.num_arrived += 1
        self.queue.add(entry)
        return entry

    def start(self, *, num_output: int = 0) -> str:
        entry = self.queue.first
        assert entry is not None
        self.queue.start(entry)
        self.queue.charge(entry.request.tenant, len(entry.request.prompt_token_ids) + num_output)
        return entry.request_id


def test_requests_of_one_tenant_start_in_order_of_arrival() -> None:
    crowd = Crowd()
    names = [crowd.add("a").request_id for _ in range(5)]
    assert [crowd.start() for _ in names] == names
    assert crowd.queue.first is None


def test_lower_priority_number_starts_sooner_and_equal_ones_by_arrival() -> None:
    crowd = Crowd()
    for priority in (0, 5, -3, 5, 0):
        crowd.add("a", priority)
    assert [crowd.start() for _ in range(5)] == ["a2", "a0", "a4", "a1", "a3"]


def test_tenants_take_turns_by_tokens_however_many_requests_they_bring() -> None:
    crowd = Crowd()
    for _ in range(6):
        crowd.add("greedy", num_prompt=20)
    for _ in range(4):
        crowd.add("modest", num_prompt=10)
    order = [crowd.start()[:6] for _ in range(6)]
    assert order == ["greedy", "modest", "modest", "greedy", "modest", "modest"]


def test_generated_tokens_count_as_computed_ones_do() -> None:
    crowd = Crowd()
    for tenant in "aabb":
        crowd.add(tenant)
    assert crowd.start(num_output=90) == "a0"
    assert [crowd.start() for _ in range(3)] == ["b2", "b3", "a1"]


def test_priority_does_not_overtake_other_tenants() -> None:
    crowd = Crowd()
    crowd.add("a")
    for _ in range(3):
        crowd.add("b", -100)
    assert [crowd.start() for _ in range(4)] == ["a0", "b1", "b2", "b3"]


def test_tenant_that_was_away_has_not_saved_up() -> None:
    crowd = Crowd()
    for _ in range(4):
        crowd.add("busy")
    for _ in range(3):
        crowd.start()
    crowd.add("new")
    crowd.add("new")
    assert [crowd.start() for _ in range(3)] == ["busy3", "new4", "new5"]


def test_tenant_that_leaves_and_comes_back_keeps_what_it_had() -> None:
    crowd = Crowd()
    crowd.add("a", num_prompt=60)
    for _ in range(7):
        crowd.add("b")
    assert [crowd.start(), crowd.start()] == ["a0", "b1"]
    crowd.add("a")
    assert [crowd.start() for _ in range(7)] == ["b2", "b3", "b4", "b5", "b6", "b7", "a8"]


def test_oldest_request_is_passed_over_a_bounded_number_of_times() -> None:
    crowd = Crowd()
    patient = crowd.add("a", 100)
    started = []
    while patient.request_id not in started:
        crowd.add("a", -100)
        started.append(crowd.start())
    assert len(started) == MAX_OVERTAKES + 1


def test_start_out_of_turn_raises() -> None:
    crowd = Crowd()
    crowd.add("a")
    second = crowd.add("a")
    with pytest.raises(InternalError, match="out of turn"):
        crowd.queue.start(second)


def test_removed_requests_leave_nothing_behind() -> None:
    crowd = Crowd()
    kept = crowd.add("a", 50)
    for _ in range(1000):
        crowd.queue.remove(crowd.add("a"))
        crowd.queue.remove(crowd.add("b"))
    assert len(crowd.queue) == 1
    assert crowd.queue.first is kept
    assert len(crowd.queue._tenants) == 1
    assert len(crowd.queue._tenants["a"]._by_priority) < 100
