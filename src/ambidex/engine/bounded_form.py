"""Which form the bounded policy has: the native op over pools in tile order, or the reference in plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVOrder, KVSpec, scan_bytes_per_block
from ambidex.core.policy import BoundedScores, PolicyName, resolve_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedForm:
    """`is_native`, and why."""

    is_native: bool
    why: str

    def scan_bytes(self, specs: Mapping[Tier, KVSpec]) -> dict[Tier, int]:
        """Bytes of a block of each tier that the native form keeps beside K and V."""
        if not self.is_native:
            return {}
        return {tier: scan_bytes_per_block(spec) for tier, spec in specs.items() if spec.order is KVOrder.TILES}


def choose_bounded_form(config: EngineConfig, specs: Mapping[Tier, KVSpec], *, why_ordinary: str | None) -> BoundedForm:
    """The form of the engine's policy; another policy than bounded has no native one.

    Args:
        why_ordinary: why decode steps would take the ordinary path if all keys were attended; None: they would not.
    Raises:
        ConfigError: the native form is asked for and cannot be had.
    """
    if config.policy is not PolicyName.BOUNDED:
        return BoundedForm(is_native=False, why=f"policy {config.policy} has no native form")
    scores = resolve_policy(config).bounded_scores
    if scores not in (BoundedScores.AUTO, BoundedScores.SCAN):
        return BoundedForm(is_native=False, why=f"`bounded_scores` {scores} is the reference form, in plain torch")
    reason = why_ordinary
    if reason is None and specs[Tier.DRAM].order is not KVOrder.TILES:
        reason = "K and V in host memory are not in tile order"
    dtypes = specs[Tier.DRAM].dtypes
    if reason is None and DType.INT4 in (dtypes.k, dtypes.v):
        reason = f"K and V in host memory are {dtypes}: it reads int8 and floating formats"
    if reason is None and config.verify:
        reason = "`verify` computes outputs again, which the reference form alone can do"
    if reason is None:
        return BoundedForm(is_native=True, why="keys in host memory are scanned in 8 bits by the native op")
    if scores is BoundedScores.SCAN:
        raise ConfigError(f"`bounded_scores` scan cannot be had: {reason}")
    return BoundedForm(is_native=False, why=f"reference form, in plain torch: {reason}")
