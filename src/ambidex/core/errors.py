"""The exception tree, drawn by who caused the failure.

    AmbidexError
    ├── CallerError                 the user's input: exit code 2, HTTP 4xx
    │   ├── ConfigError             a flag, environment variable, config file or budget
    │   ├── RequestError            the prompt or the sampling parameters of one request
    │   │   └── ContextLengthError  prompt (and answer) longer than the limit; carries both counts
    │   └── ModelError              what was named as a model
    │       ├── ModelNotFoundError      nothing is there
    │       ├── ModelFileError          not a model file, truncated or corrupt
    │       ├── UnsupportedModelError   a model, but not one that this engine runs
    │       └── WeightsError            missing, unexpected or mis-shaped tensors
    ├── MachineError                the machine: exit code 1, HTTP 5xx
    │   ├── TierFullError           no bytes left on a memory tier
    │   ├── NativeModuleError       the compiled module is missing or does not run here
    │   ├── CopyError               a copy between tiers failed
    │   ├── EngineLostError         the process of an engine ended, and with it what it computed
    │   ├── IntegrityError          bytes in memory are not what was written (found by --verify)
    │   └── LaneError               the accelerator and the CPU lane lost each other
    ├── RequestFailedError          one request failed inside the engine (NaN logits, lost copy); others go on
    └── InternalError               an invariant of ours broke: exit code 1, HTTP 500
        ├── ShapeError              an op was handed tensors that do not fit
        └── BoundError              an error was measured above the bound that was stated for it

Each message says what is wrong, the value that was got, the limit, and what to do next.
"""


class AmbidexError(Exception):
    """Root of everything that this package raises on purpose."""


class CallerError(AmbidexError):
    """The caller asked for something that cannot be done as asked."""


class ConfigError(CallerError):
    """A flag, environment variable, config file entry or budget is wrong."""


class RequestError(CallerError):
    """A prompt or a sampling parameter is wrong; only that request is refused."""


class ContextLengthError(RequestError):
    """The prompt does not fit into the context limit.

    Args:
        num_prompt_tokens: tokens of the prompt.
        limit: the largest context, in tokens.
    """

    def __init__(self, num_prompt_tokens: int, limit: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit
        super().__init__(
            f"prompt of {num_prompt_tokens} tokens does not fit into the context limit of {limit} tokens "
            f"(one is kept for the answer): shorten the prompt, or raise what sets the limit: `max_context_len` or "
            f"the KV budgets (`dram_memory`, `kv_gpu_tokens`)"
        )


class ModelError(CallerError):
    """What was named as a model cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no model under that name."""


class ModelFileError(ModelError):
    """A model file is truncated, corrupt or of another kind."""


class UnsupportedModelError(ModelError):
    """The model is well formed, but this engine does not run it."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected or have the wrong shape."""


class MachineError(AmbidexError):
    """The machine cannot do what is needed now."""


class TierFullError(MachineError):
    """A memory tier has no room for an allocation."""


class NativeModuleError(MachineError):
    """The compiled module is missing or does not run on this processor."""


class CopyError(MachineError):
    """A copy between tiers failed."""


class EngineLostError(MachineError):
    """The process of an engine has ended, or says nothing any more: what it was computing is lost."""


class IntegrityError(MachineError):
    """Bytes in memory are not what was written there; the requests that own them fail."""


class LaneError(MachineError):
    """The accelerator or the CPU lane did not do its part of a step in time; the requests of that step fail."""


class UnrecordableError(MachineError):
    """A step computes something that a recorded program has no op for; it runs without a program."""


class RequestFailedError(AmbidexError):
    """One request failed inside the engine; the others go on."""


class InternalError(AmbidexError):
    """An invariant of this package broke."""


class ShapeError(InternalError):
    """An op was handed tensors whose shapes, dtypes or devices do not fit."""


class BoundError(InternalError):
    """An output differs from the exact one by more than the bound that was stated for it."""
