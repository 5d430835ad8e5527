import pytest

from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, RequestStatus, SamplingParams
from ambidex.sched.entry import Entry
from ambidex.sched.queue import RequestQueues


def make_queues(names: str) -> tuple[RequestQueues, list[Entry]]:
    queues = RequestQueues()
    requests = [
        Request(request_id=RequestId(name), prompt_token_ids=(1,), params=SamplingParams(), max_total_tokens=8)
        for name in names
    ]
    return queues, [queues.add(request) for request in requests]


def test_add_numbers_requests_in_order_of_arrival() -> None:
    _, entries = make_queues("abc")
    assert [entry.arrival for entry in entries] == [0, 1, 2]


def test_find_knows_waiting_and_running_requests_only() -> None:
    queues, (a, b) = make_queues("ab")
    queues.start(a)
    assert queues.find(RequestId("a")) is a
    assert queues.find(RequestId("b")) is b
    queues.remove(a)
    assert queues.find(RequestId("a")) is None


def test_start_moves_the_first_waiting_request_to_the_end_of_the_running_ones() -> None:
    queues, (a, b) = make_queues("ab")
    queues.start(a)
    queues.start(b)
    assert list(queues.running()) == [a, b]
    assert queues.last_running is b
    assert b.request.status is RequestStatus.RUNNING


def test_start_out_of_turn_raises() -> None:
    queues, (_, b) = make_queues("ab")
    with pytest.raises(InternalError, match="starts out of turn"):
        queues.start(b)


def test_requeue_puts_the_last_running_request_before_the_waiting_ones() -> None:
    queues, (a, b, c) = make_queues("abc")
    queues.start(a)
    queues.start(b)
    queues.requeue(b)
    queues.requeue(a)
    assert queues.first_waiting is a
    assert a.request.status is RequestStatus.WAITING
    for entry in (a, b, c):
        queues.start(entry)


def test_requeue_out_of_turn_raises() -> None:
    queues, (a, b) = make_queues("ab")
    queues.start(a)
    queues.start(b)
    with pytest.raises(InternalError, match="yields out of turn"):
        queues.requeue(a)


def test_remove_forgets_a_waiting_request() -> None:
    queues, (a, b) = make_queues("ab")
    queues.remove(a)
    assert queues.first_waiting is b
    assert a.request.status is RequestStatus.FINISHED


def test_remove_twice_raises() -> None:
    queues, (a,) = make_queues("a")
    queues.remove(a)
    with pytest.raises(InternalError, match="in no queue"):
        queues.remove(a)
