"""The next step before the tokens of this one are known: what must hold for it, and how far each request then is.

    running   a: 70 tokens    b: 12    c: 99 of at most 100
    next      a: 71           b: 13    (c ends with the token that the running step gives it)

While the accelerator computes one step, the next is planned and sent behind it, so that it never waits for the host.
That is possible when tokens are all that is missing: each running request has its next token sampled by the step that
runs, no other may start, no block moves or has to move or to be taken from anyone, and no request is held to a grammar.
"""

from collections.abc import Callable, Iterable, Mapping

from ambidex.core.ids import RequestId
from ambidex.core.request import Request
from ambidex.kv.manager import KVManager
from ambidex.sched.entry import Entry


def find_next_lens(
    running: Iterable[Entry], ends: Mapping[RequestId, int], kv: KVManager, max_len: Callable[[Request], int]
) -> list[tuple[Entry, int]] | None:
    """The requests of the next step, and the tokens of each up to and with the pending one.

    Args:
        running: all running requests, in order.
        ends: by request of the running step whose next token it samples: the tokens that it computes it up to.
        max_len: tokens at which a request's answer is cut.
    Returns:
        None if the step cannot be planned yet, or has nobody in it.
    """
    lens, num_missing = [], 0
    for entry in running:
        end = ends.get(entry.request_id)
        if end is None or entry.lease is None or entry.request.params.guide is not None:
            return None
        if end + 1 >= max_len(entry.request):  # its last token is being sampled
            continue
        lens.append((entry, end + 1))
        num_missing += kv.num_missing_blocks(entry.lease, end + 1)
    if not lens or num_missing > kv.num_free_blocks:
        return None
    return lens if kv.is_settled({entry.lease: num for entry, num in lens if entry.lease is not None}) else None
