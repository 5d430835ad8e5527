"""How fast memory is read, as `calibrate` measures it."""

from ambidex.calibrate.memory_rate import gpu_read_rate, native_read_rate, probe_bytes, read_bandwidth

__all__ = ["gpu_read_rate", "native_read_rate", "probe_bytes", "read_bandwidth"]
