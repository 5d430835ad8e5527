"""From where on one form of a computation is the faster one, as `ambidex calibrate` has measured it, if it has."""

import os
from dataclasses import dataclass

import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.engine.report import ReportRow
from ambidex.hw.profile import CpuRates, HardwareProfile, Machine, NeuronRates
from ambidex.hw.profile_file import default_path, has_profile, read_profile
from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu.linear import LEAST_TILED_TOKENS, TILED_KINDS, TilesFrom


@dataclass(frozen=True, slots=True)
class Crossovers:
    """What is known of this machine; `cpu` None: nothing, for the reason in `why`, which else says whence."""

    cpu: CpuRates | None
    why: str

    @property
    def tiles_from(self) -> TilesFrom:
        """Tokens from which on matrix tiles multiply 4-bit weights."""
        return LEAST_TILED_TOKENS if self.cpu is None else self.cpu.tiles_from

    def neurons(self, dtype: DType) -> NeuronRates | None:
        """What rows of neurons cost; None: not known."""
        return None if self.cpu is None else self.cpu.neurons.get(dtype.value)

    def tile_row(self) -> ReportRow:
        """From where on 4-bit weights are multiplied in tiles, for people."""
        known = {} if self.cpu is None else self.cpu.tiles_from
        found = {kind: known.get(kind, LEAST_TILED_TOKENS) for kind in TILED_KINDS}
        value = ", ".join(f"{kind} {'never' if num is None else f'from {num} tokens'}" for kind, num in found.items())
        return ReportRow(section="compute", name="tiles", value=value, why=self.why)


def find_crossovers(device: torch.device, num_threads: int, profile: HardwareProfile | None) -> Crossovers:
    """What the machine's profile says of the CPU lane; a profile that is of another machine, of an older form or of
    another number of threads says nothing.

    Args:
        profile: None: the one that `ambidex calibrate` wrote, if there is one.
    """
    try:
        if profile is None and not has_profile(os.environ):
            return Crossovers(None, "not measured on this machine: `ambidex calibrate` does")
        profile = profile or read_machine_profile(device)
    except ConfigError as error:
        return Crossovers(None, str(error))
    if not profile.cpu.neurons:
        return Crossovers(None, f"not known: {profile.source}")
    if profile.cpu.num_threads != num_threads:
        why = f"the profile was measured with {profile.cpu.num_threads} threads, these are {num_threads}"
        return Crossovers(None, why)
    return Crossovers(profile.cpu, f"{profile.source}, {profile.date}")


def read_machine_profile(device: torch.device) -> HardwareProfile:
    """The profile of this machine.

    Raises:
        ConfigError: there is none, or it is another machine's; says how to make one.
    """
    topology = read_topology()
    gpu = torch.cuda.get_device_properties(device).name if device.type == "cuda" else None
    profile = read_profile(default_path(os.environ))
    profile.check_machine(Machine(cpu=topology.cpu_model, cores=topology.num_usable_cores, gpu=gpu))
    return profile
