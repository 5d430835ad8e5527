"""`Entry`: a request in the scheduler's hands."""

from dataclasses import dataclass

from ambidex.core.ids import RequestId
from ambidex.core.request import Request
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
    is_restored: bool = False
    """What lies on disk of its prefix has been asked for, since it last waited."""
    max_chunk: int | None = None
    """Most tokens that a step computes of it, once the accelerator had no memory for more."""

    @property
    def request_id(self) -> RequestId:
        """Identity of the request."""
        return self.request.request_id
