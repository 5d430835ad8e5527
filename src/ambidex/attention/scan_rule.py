"""`ScanRule`: from how many keys in DRAM on the bounded policy scans them in decode steps; fewer are attended exactly.

Seconds of a layer, by the rate at which the lanes read DRAM together and the bytes of a key:

    exact     products + (keys · exact bytes − products · link) / rate       the link works through the products, too
    bounded   products + keys · (scanned bytes + kept share · 2 · bytes of a kept key) / scan rate + 60 µs

The scan rate is that of the lanes that scan: the same, or without a scan lane the CPU's alone. The kept share is that
of the last step that scanned; the products are what is left of the time of the fastest of the last such steps.
"""

from collections import deque
from typing import Final

_EXTRA_S: Final = 60e-6
"""What a layer's scan takes however few its keys are: thresholds are waited for, the launches of the scan lane.
Measured on 16 cores and an H200, Llama-3.1-8B's shape: steps of 3,000 and 7,100 keys in DRAM took 0.6 ms longer and 1.0
ms less than exact ones: 32 times 57 µs and 12 ns a key."""
_KEPT_COST: Final = 2
"""Kept keys are single rows: there the CPU's threads read half as many bytes a second of them as of runs (42 GB/s)."""
_FIRST_KEPT_SHARE: Final = 0.05
"""Before anything was scanned: between what sharp and flat attention keep at a dropped mass of 0.01."""
_NUM_TIMED: Final = 3
"""Scanning steps before their times count, and of how many the fastest does: one that was held up says nothing."""
_LOOK_AGAIN_STEPS: Final = 64
"""Steps after which keys are scanned once more where too many were kept, to see whether it is still so."""


class ScanRule:
    """Chooses step by step.

    Args:
        rate: bytes/s at which the lanes read DRAM together; `link`: what the link has of it, 0 without a stream lane;
            `scan_rate`: what the lanes that scan have of it, None: all.
        exact_bytes, scanned_bytes, kept_bytes: of a key of one layer, all KV heads: attended exactly, scanned, and what
            is read besides where it is kept.
    """

    def __init__(
        self,
        rate: float,
        *,
        link: float = 0.0,
        scan_rate: float | None = None,
        exact_bytes: int,
        scanned_bytes: int,
        kept_bytes: int,
    ) -> None:
        self._rate, self._link = rate, link
        self._scan_rate = scan_rate if scan_rate is not None else rate
        self._products_s = 0.0
        self._found_s: deque[float] = deque(maxlen=_NUM_TIMED)
        self._exact, self._scanned, self._kept = exact_bytes, scanned_bytes, kept_bytes
        self._kept_share = _FIRST_KEPT_SHARE
        self._num_held_back = 0

    def least_keys(self, kept_share: float) -> float:
        """Keys from which scanning is the faster, if such a share of them is kept; infinite where it never is."""
        saved = self._exact - self._bytes_of_key(kept_share) * self._rate / self._scan_rate
        return (_EXTRA_S * self._rate + self._products_s * self._link) / saved if saved > 0 else float("inf")

    def _bytes_of_key(self, kept_share: float) -> float:
        """Of a scanned key, those of kept ones as they count."""
        return self._scanned + kept_share * _KEPT_COST * self._kept

    def is_scanned(self, num_keys: int) -> bool:
        """Whether the next step scans its keys in DRAM.

        Args:
            num_keys: all requests together.
        """
        if num_keys >= self.least_keys(self._kept_share):
            return True
        return self._may_be_scanned(num_keys) and self._num_held_back >= _LOOK_AGAIN_STEPS - 1

    def count(self, num_keys: int, *, was_scanned: bool) -> None:
        """A step of so many keys in DRAM has run."""
        if was_scanned:
            self._num_held_back = 0
        elif self._may_be_scanned(num_keys):
            self._num_held_back += 1

    def _may_be_scanned(self, num_keys: int) -> bool:
        """It would be the faster way, were few enough of them kept."""
        return num_keys >= self.least_keys(0.0)

    def note(self, kept_share: float) -> None:
        """Of the keys that a step scanned, so many were kept."""
        self._kept_share = kept_share

    def note_time(self, layer_s: float, num_keys: int) -> None:
        """A step that scanned so many keys took so long, over its layers."""
        products_s = layer_s - _EXTRA_S - num_keys * self._bytes_of_key(self._kept_share) / self._scan_rate
        self._found_s.append(max(products_s, 0.0))
        if len(self._found_s) == _NUM_TIMED:
            self._products_s = min(self._found_s)


class ScanAlways:
    """In place of a rule where no rate is known: scans from a number of keys on.

    Args:
        least_keys: all requests together.
    """

    def __init__(self, least_keys: int) -> None:
        self._least_keys = least_keys

    def is_scanned(self, num_keys: int) -> bool:
        """See `ScanRule`."""
        return num_keys >= self._least_keys

    def count(self, num_keys: int, *, was_scanned: bool) -> None:
        """See `ScanRule`; changes nothing."""

    def note(self, kept_share: float) -> None:
        """See `ScanRule`; changes nothing."""

    def note_time(self, layer_s: float, num_keys: int) -> None:
        """See `ScanRule`; changes nothing."""
