"""`exact`: every key is attended. An engine with this policy does not come here; comparisons and tests do."""

from ambidex.attention.select.policy import AllKeys, Policy, PolicyRequest, Selector


class Exact(Policy):
    """All keys, at every step."""

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        del request, layer_idx
        return AllKeys()
