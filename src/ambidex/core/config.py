"""What the user may set for an engine. Defaults are stated here once; command line, environment and file are read from
these fields (`help`, `unit` and `kind` of each field's metadata)."""

import dataclasses
import difflib
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.kv_dtypes import FORMS, KVDTypes, parse_kv_dtypes
from ambidex.core.kv_mapping import KVMapping, parse_slow_memory
from ambidex.core.policy import (
    LANE_PRESETS,
    BoundedScores,
    H2OForm,
    HybridGenFeedback,
    HybridGenMode,
    PolicyName,
    resolve_policy,
)
from ambidex.core.sparsity import OFF, NeuronCache, parse_sparsity
from ambidex.core.units import GIB, MIB, format_count, parse_size


class DeviceKind(StrEnum):
    """Accelerator. `auto`: CUDA if there is a GPU, else the CPU (then both tiers are pools in DRAM)."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DTypeChoice(StrEnum):
    """Format to compute in. `auto`: the checkpoint's 16-bit format on a GPU, fp32 on a CPU without bf16 units."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class KVDTypeChoice(StrEnum):
    """Format of K and V in host memory, where it is one. `auto`: that of the weights. `int8`: half the bytes, a scale a
    row. `int4`: a third, groups of 16 numbers."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


class LoadFormat(StrEnum):
    """`auto`: what the files are. `dummy`: random weights made from the config alone, for benchmarks."""

    AUTO = "auto"
    DUMMY = "dummy"


class Graphs(StrEnum):
    """`auto`: decode steps are recorded once and replayed. `off`: every step is computed op by op."""

    AUTO = "auto"
    OFF = "off"


class SettingKind(StrEnum):
    """How the text of a flag or variable is read."""

    TEXT = "text"
    INT = "int"
    SIZE = "size"
    NUMBER = "number"
    SWITCH = "switch"
    CHOICE = "choice"


_NAMED: Final = re.compile(r"`([a-z][a-z0-9_]*)`")
MAX_NUMBER: Final = 2**63 - 1
"""What a signed 64-bit number holds."""


def setting(
    default: object,
    kind: SettingKind,
    help_text: str,
    *,
    unit: str = "",
    low: int | None = None,
    high: int = MAX_NUMBER,
) -> Any:
    """A field that the user may set: a dataclass field with what command line, file and documentation need to know.

    A `default` of () makes it repeatable: a tuple of texts.
    """
    return field(default=default, metadata={"kind": kind, "help": help_text, "unit": unit, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; `None` means: chosen from the model and the machine when the engine is built.

    Raises:
        ConfigError: a value is out of its range.
    """

    model: str
    device: DeviceKind = setting(DeviceKind.AUTO, SettingKind.CHOICE, "accelerator to compute on")
    dtype: DTypeChoice = setting(
        DTypeChoice.AUTO, SettingKind.CHOICE,
        "number format of weights, activations and KV; auto leaves a GGUF's quantised matrices as stored on a CPU",
    )  # fmt: skip
    kv_dtype: str = setting(
        KVDTypeChoice.AUTO.value, SettingKind.TEXT,
        f"number format of K and V in host memory: {FORMS}; int8 halves what attention reads, int4 leaves a third of "
        f"it, and both round (docs/kv_formats.md)",
    )  # fmt: skip
    load_format: LoadFormat = setting(
        LoadFormat.AUTO, SettingKind.CHOICE, "auto reads the model's files; dummy makes random weights from its config"
    )
    chat_template: str | None = setting(
        None, SettingKind.TEXT, "file with a Jinja chat template, in place of the one that the model brings"
    )
    max_context_len: int | None = setting(
        None, SettingKind.INT, "longest prompt and answer together; default: the model's, or what the KV tiers hold",
        unit="tokens", low=2,
    )  # fmt: skip
    block_size: int = setting(64, SettingKind.INT, "tokens of a KV block", unit="tokens", low=1, high=1024)
    gpu_memory: int | None = setting(
        None, SettingKind.SIZE,
        "budget of the accelerator tier (weights, workspace, KV); default: 90 % of the free memory",
        unit="bytes",
    )  # fmt: skip
    weights_gpu_memory: int | None = setting(
        None, SettingKind.SIZE,
        "memory of the accelerator tier for weights; the rest lies in DRAM, where the CPU multiplies one part and the "
        "accelerator reads the other over the link; default: what gpu-memory leaves beside workspace and some KV",
        unit="bytes",
    )  # fmt: skip
    placement: str | None = setting(
        None, SettingKind.TEXT,
        "JSON file that says which share of each layer's weights lies where, in place of weights-gpu-memory; auto: as "
        "the cost model finds it fastest on this machine, which `ambidex calibrate` has measured",
    )  # fmt: skip
    mlp_sparsity: str = setting(
        OFF, SettingKind.TEXT,
        "neurons of MLPs that a step leaves out: off; relu: those that a ReLU sets to 0, exact; relu-screened: the "
        "same, and an 8-bit copy in DRAM rules out rows before they are read, exact; cats:SHARE and teal:SHARE (0.2 "
        "and 0.4 if it is left out): those below thresholds that `ambidex calibrate neurons` has measured, which "
        "changes answers",
    )  # fmt: skip
    neuron_profile: str | None = setting(
        None, SettingKind.TEXT,
        "file of `ambidex calibrate neurons`; default: the one that it wrote for this model into the user's cache",
    )  # fmt: skip
    mlp_predictor: str | None = setting(
        None, SettingKind.TEXT,
        "GGUF or safetensors file of trained predictors (blk.N.fc1.weight, blk.N.fc2.weight), which say which neurons "
        "the CPU computes with mlp-sparsity relu: changes answers",
    )  # fmt: skip
    neuron_cache: NeuronCache = setting(
        NeuronCache.OFF, SettingKind.CHOICE,
        "which neurons of a divided MLP lie on the accelerator, where mlp-sparsity skips the others; off: the first "
        "ones; static: the most active of the neuron profile, as PowerInfer has it; dynamic: the most active of late",
    )  # fmt: skip
    neuron_move_memory: int = setting(
        8 * MIB, SettingKind.SIZE, "bytes of neurons that dynamic has on their way at a time, both ways together",
        unit="bytes", low=1,
    )  # fmt: skip
    kv_gpu_tokens: int | None = setting(
        None, SettingKind.INT,
        "tokens of KV on the accelerator tier, rounded up to blocks; default: what gpu-memory leaves",
        unit="tokens", low=0,
    )  # fmt: skip
    dram_memory: int | None = setting(
        None, SettingKind.SIZE,
        "budget of the DRAM tier (weights that do not lie on a GPU, KV); default: the weights and 45 % of the free "
        "memory, at most what is used",
        unit="bytes",
    )  # fmt: skip
    cxl_memory: int | None = setting(
        None, SettingKind.SIZE,
        "budget of the CXL tier, a NUMA node of memory without cores, for K and V; default: none of it is used",
        unit="bytes", low=1,
    )  # fmt: skip
    cxl_node: int | None = setting(
        None, SettingKind.INT,
        "NUMA node of the CXL tier, which may be any that this process may use; default: the nearest without cores",
        low=0, high=4095,
    )  # fmt: skip
    kv_mapping: KVMapping = setting(
        KVMapping.AUTO, SettingKind.CHOICE,
        "where K and V in host memory lie; k-dram-v-cxl: K in DRAM, the oldest in the CXL tier where DRAM is full, and "
        "V in the CXL tier; interleave: pages of both in turn on both; dram: all there; auto: k-dram-v-cxl if "
        "cxl-memory is given, else dram",
    )  # fmt: skip
    emulate_cxl: str | None = setting(
        None, SettingKind.TEXT,
        "play the CXL tier in DRAM: LATENCY,BANDWIDTH, such as 300ns,20GB/s; reads and copies of what lies there are "
        "paced to that, and every report says `emulated`",
    )  # fmt: skip
    prefix_cache_percent: int | None = setting(
        None, SettingKind.INT,
        "share of the KV blocks of all tiers that may keep tokens of ended requests, for others that begin alike; 0 "
        "turns it off; default: 100 for serve and chat, else 0", unit="%", low=0, high=100,
    )  # fmt: skip
    session_dir: str | None = setting(
        None, SettingKind.TEXT,
        "keep what the prefix cache has of ended requests as files in this folder, too, so that it outlives the "
        "process; their tokens lie there in the clear",
    )  # fmt: skip
    session_quota: int = setting(
        4 * GIB, SettingKind.SIZE, "most that these files may take together; the least recently used go", unit="bytes",
        low=1,
    )  # fmt: skip
    num_sink_tokens: int = setting(
        64, SettingKind.INT, "first tokens of a context, kept on the accelerator tier", unit="tokens", low=0
    )
    recent_window: int | None = setting(
        None, SettingKind.INT, "last tokens of a context, kept on the accelerator tier; older ones are demoted "
        "to DRAM; default: as many as fit", unit="tokens", low=0,
    )  # fmt: skip
    max_tokens_per_step: int = setting(
        512, SettingKind.INT, "token budget of one step; longer prompts are computed in chunks", unit="tokens", low=1
    )
    max_running_requests: int = setting(64, SettingKind.INT, "requests computed in one step", unit="requests", low=1)
    stream_percent: int | None = setting(
        None, SettingKind.INT,
        "share of the keys in DRAM that a GPU reads over the link in decode steps, beside the CPU; default: from both "
        "rates, measured", unit="%", low=0, high=100,
    )  # fmt: skip
    graphs: Graphs = setting(
        Graphs.AUTO, SettingKind.CHOICE,
        "auto records decode steps and replays them, as CUDA graphs on a GPU, as native programs on a CPU; off never "
        "does",
    )  # fmt: skip
    policy: PolicyName = setting(
        PolicyName.EXACT, SettingKind.CHOICE,
        "which keys a decode step attends; exact: all; bounded: all but a known mass; flexgen, moe_lightning: all, "
        "read over the link or by the CPU alone; the others as published",
    )  # fmt: skip
    policy_tokens: int | None = setting(
        None, SettingKind.INT, "keys from before a step that the policy attends, at most; default: the policy's",
        unit="tokens", low=1,
    )  # fmt: skip
    policy_percent: int | None = setting(
        None, SettingKind.INT, "the same as a share of the prompt; default: the policy's", unit="%", low=1, high=100
    )
    recent_percent: int | None = setting(
        None, SettingKind.INT,
        "share of them that are the newest keys (h2o drop, keyformer, qinfer_windows); default: the policy's",
        unit="%", low=0, high=100,
    )  # fmt: skip
    sink_tokens: int | None = setting(
        None, SettingKind.INT, "first keys that streaming_llm attends; default: 4", unit="tokens", low=0
    )
    h2o_form: H2OForm = setting(H2OForm.AUTO, SettingKind.CHOICE, "which of H2O's programs is followed; auto: flexgen")
    tau_start: float | None = setting(
        None, SettingKind.NUMBER, "temperature of keyformer's scores for the prompt; default: 1", low=0
    )
    tau_end: float | None = setting(None, SettingKind.NUMBER, "the same at the longest answer; default: 2", low=0)
    page_tokens: int | None = setting(
        None,
        SettingKind.INT,
        "tokens of a page that quest chooses as one; default: 16",
        unit="tokens",
        low=1,
        high=4096,
    )
    exact_layers: int | None = setting(
        None, SettingKind.INT, "first layers that attend all keys (quest, infinigen, hybridgen); default: 2, or as "
        "calibrated for hybridgen",
        unit="layers", low=0,
    )  # fmt: skip
    alpha: float | None = setting(
        None, SettingKind.NUMBER, "how far below the best score infinigen still fetches; default: 4", low=0
    )
    partial_percent: int | None = setting(
        None, SettingKind.INT, "share of a head's columns that infinigen, and hybridgen in pre mode, predict with; "
        "default: 20", unit="%", low=1, high=100,
    )  # fmt: skip
    hybridgen_mode: HybridGenMode = setting(
        HybridGenMode.AUTO, SettingKind.CHOICE, "select after all scores, or by a predictor; auto: post"
    )
    hybridgen_feedback: HybridGenFeedback = setting(
        HybridGenFeedback.AUTO, SettingKind.CHOICE,
        "what hybridgen changes by measured stage times: mode; full: the number of selected keys, then the mode; auto: "
        "off",
    )  # fmt: skip
    min_selected_tokens: int | None = setting(
        None, SettingKind.INT, "keys that hybridgen's feedback leaves selected at least; default: as calibrated, "
        "else 64",
        unit="tokens", low=2,
    )  # fmt: skip
    near_tokens: int | None = setting(
        None, SettingKind.INT, "newest keys that hybridgen always attends, with true scores; default: 64",
        unit="tokens", low=0,
    )  # fmt: skip
    accuracy_profile: str | None = setting(
        None, SettingKind.TEXT,
        "file of `ambidex calibrate accuracy`: least keys and first layers of hybridgen, where they are not set; "
        "default: the one that it wrote for this model into the user's cache",
    )  # fmt: skip
    max_dropped_mass: float | None = setting(
        None, SettingKind.NUMBER,
        "softmax mass that bounded may drop in each head, from 0 to below 1; default: 0.01", unit="share", low=0,
    )  # fmt: skip
    bounded_scores: BoundedScores = setting(
        BoundedScores.AUTO, SettingKind.CHOICE,
        "what bounded chooses by: scan is the native op, 8-bit scores and their error; exact (K itself) and int8 are "
        "the reference form; auto: scan, or exact where it cannot be had",
    )  # fmt: skip
    hot_tokens: int | None = setting(
        None, SettingKind.INT,
        "tokens of the accelerator's KV that bounded leaves to copies of the blocks in DRAM whose keys it keeps most, "
        "rounded up to blocks; 0: there are none; default: what is free beside sink and recent tokens",
        unit="tokens", low=0,
    )  # fmt: skip
    num_threads: int | None = setting(
        None,
        SettingKind.INT,
        "CPU threads; default: the cores this process may use",
        unit="threads",
        low=1,
        high=4096,
    )
    tune_weights: bool = setting(
        False, SettingKind.SWITCH,
        "with placement auto: follow measured decode steps, and move weights between GPU, CPU and link where that is "
        "predicted to pay; takes DRAM for what may leave the GPU",
    )  # fmt: skip
    trace: str | None = setting(
        None,
        SettingKind.TEXT,
        "write a timeline of steps and lanes to this file, for ui.perfetto.dev; slows steps down",
    )
    control_trace: str | None = setting(
        None,
        SettingKind.TEXT,
        "write each decision of the controllers (hybridgen's feedback, shares of lanes, hot blocks) to this file, a "
        "JSON line each",
    )
    verify: bool = setting(
        False, SettingKind.SWITCH,
        "check KV in host memory: copies are read back, blocks have checksums; and a sample of what the bounded policy "
        "answers; slows steps down",
    )  # fmt: skip
    seed: int = setting(0, SettingKind.INT, "seed of dummy weights and of requests without a seed of their own", low=0)

    @classmethod
    def of(cls, model: "str | EngineConfig", settings: Mapping[str, Any]) -> "EngineConfig":
        """A configuration as it is, or a model's name with settings of the fields' names.

        Raises:
            ConfigError: a setting is unknown, wrong, or given beside a whole configuration.
        """
        known = [item.name for item in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(f"setting {name!r} is unknown{f': did you mean {near[0]}?' if near else ''}")
        if not isinstance(model, EngineConfig):
            return cls(model=model, **settings)
        if settings:
            raise ConfigError(f"settings ({', '.join(settings)}) beside an EngineConfig: put them into it")
        return model

    def keeping_prefixes(self) -> "EngineConfig":
        """The same for requests that come back to what others have said: with a prefix cache, unless it is set.

        Elsewhere it is off where nobody asks for it: prompts that are computed are what benchmarks measure, and a
        prompt that is computed in other chunks than before is rounded otherwise.
        """
        if self.prefix_cache_percent is not None or not self.policy.attends_all:  # a policy follows each prompt
            return self
        return dataclasses.replace(self, prefix_cache_percent=100)

    @property
    def kv_dtypes(self) -> KVDTypes | None:
        """`kv_dtype`, read; None: the format of the weights."""
        return parse_kv_dtypes(self.kv_dtype)

    @property
    def kv_layout(self) -> KVMapping:
        """`kv_mapping`, with `auto` decided."""
        if self.kv_mapping is not KVMapping.AUTO:
            return self.kv_mapping
        return KVMapping.DRAM if self.cxl_memory is None else KVMapping.K_DRAM_V_CXL

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.model:
            raise ConfigError("no model is named: give a folder, a .gguf file, a Hub id or smollm2")
        resolve_policy(self)
        dtypes = parse_kv_dtypes(self.kv_dtype)
        object.__setattr__(self, "kv_dtype", str(dtypes or KVDTypeChoice.AUTO))
        if parse_sparsity(self.mlp_sparsity) is None and self.neuron_cache is not NeuronCache.OFF:
            raise ConfigError(
                f"`neuron_cache` is {self.neuron_cache}, but without `mlp_sparsity` all neurons are computed wherever "
                f"they lie: choose one of its forms, or off"
            )
        _check_cxl(self)
        if self.placement is not None and self.weights_gpu_memory is not None:
            raise ConfigError("`placement` and `weights_gpu_memory` both say where weights lie: leave one of them out")
        if self.tune_weights and self.mlp_sparsity != OFF:
            raise ConfigError(
                f"`tune_weights` moves whole rows by the time that all of them take, `mlp_sparsity` is "
                f"{self.mlp_sparsity}: leave one of them out"
            )
        if self.tune_weights and self.placement != "auto":
            raise ConfigError(
                f"`tune_weights` moves weights away from a solved placement, `placement` is {self.placement}: use auto"
            )
        self._check_preset()
        if not self.policy.attends_all and self.prefix_cache_percent:
            raise ConfigError(
                f"`prefix_cache_percent` is {self.prefix_cache_percent}: policy {self.policy} must see every prompt as "
                f"it is computed: use 0, or policy exact"
            )
        if self.session_dir is not None and not self.policy.attends_all:
            raise ConfigError(f"`session_dir` needs a prefix cache, which policy {self.policy} has not: leave it out")
        if self.session_dir is not None and self.prefix_cache_percent == 0:
            raise ConfigError("`session_dir` needs a prefix cache, and `prefix_cache_percent` is 0: leave one out")

    def _check_preset(self) -> None:
        """Refuse what decides the same as a policy that says who reads what."""
        preset = LANE_PRESETS.get(self.policy)
        if preset is None:
            return
        if self.stream_percent not in (None, preset.stream_percent):
            raise ConfigError(
                f"`stream_percent` is {self.stream_percent}, and `policy` {self.policy} means {preset.stream_percent}: "
                f"leave it out, or use `policy` exact"
            )
        if self.placement not in (None, "auto"):
            raise ConfigError(
                f"`placement` {self.placement} says where weights lie, and so does `policy` {self.policy}: leave it "
                f"out, use auto, which follows the rule that was published, or use `policy` exact"
            )
        if self.tune_weights:
            raise ConfigError(
                f"`tune_weights` moves what `policy` {self.policy} has placed by its own rule: leave it out, or use "
                f"`policy` exact"
            )
        if self.mlp_sparsity != OFF:
            raise ConfigError(
                f"`mlp_sparsity` {self.mlp_sparsity} is for what the CPU multiplies, which is nothing with `policy` "
                f"{self.policy}: leave it out, or use `policy` exact"
            )


def _check_cxl(config: EngineConfig) -> None:
    """See that what is set of the CXL tier fits together."""
    if config.emulate_cxl is not None:
        parse_slow_memory(config.emulate_cxl)
    if config.cxl_memory is None:
        given = [name for name in ("cxl_node", "emulate_cxl") if getattr(config, name) is not None]
        if config.kv_mapping not in (KVMapping.AUTO, KVMapping.DRAM):
            given.append("kv_mapping")
        if given:
            raise ConfigError(
                f"`{given[0]}` is {getattr(config, given[0])}, but the CXL tier has no budget: give `cxl_memory`, too"
            )
        return
    if config.kv_mapping is KVMapping.DRAM:
        raise ConfigError("`kv_mapping` dram puts nothing into the CXL tier, and `cxl_memory` is given: leave one out")
    if config.emulate_cxl is not None and config.cxl_node is not None:
        raise ConfigError("`cxl_node` and `emulate_cxl` both say what the CXL tier is: leave one of them out")


def check_settings(config: Any) -> None:
    """Check every `setting` of a dataclass and bring it into its form: text of a size, name of a choice, list.

    Raises:
        ConfigError: a value is out of its range or of another type.
    """
    for item in dataclasses.fields(config):
        kind, value = item.metadata.get("kind"), getattr(config, item.name)
        if value is None and item.default is None:
            continue
        match kind:
            case SettingKind.CHOICE:
                choices: Any = type(item.default)
                value = _choice(item.name, value, choices)
            case SettingKind.SIZE | SettingKind.INT:
                value = parse_size(value) if kind is SettingKind.SIZE and isinstance(value, str) else value
                _check_number(item.name, value, low=item.metadata["low"] or 0, high=item.metadata["high"])
            case SettingKind.NUMBER:
                _check_real(item.name, value, low=item.metadata["low"] or 0, high=item.metadata["high"])
            case SettingKind.SWITCH:
                if not isinstance(value, bool):
                    raise ConfigError(f"`{item.name}` is {value!r}: it must be true or false")
            case _ if item.default == ():
                value = _texts(item.name, value)
            case _:
                _check_text(item.name, value)
        object.__setattr__(config, item.name, value)


def _texts(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"`{name}` is {values!r}: it must be a list of texts")
    for value in values:
        _check_text(name, value)
    return tuple(values)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"`{name}` is {value!r}: it must be text")


def _check_real(name: str, value: object, *, low: int, high: int) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        too_large = isinstance(value, int | float) and value > high
        limit = f"of at most {high}" if too_large else f"of at least {low}"
        raise ConfigError(f"`{name}` is {value!r}: it must be a number {limit}")


def _choice(name: str, value: str, choices: type[StrEnum]) -> StrEnum:
    """The member that a value names: `"cuda"` is as good as `DeviceKind.CUDA`."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise ConfigError(f"`{name}` is {value!r}: it must be one of {known}") from None


def _check_number(name: str, value: object, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"`{name}` is {value!r}: it must be a whole number")
    if value < low:
        raise ConfigError(f"`{name}` is {value}: it must be at least {low}")
    if value > high:
        raise ConfigError(f"`{name}` is {format_count(value)}: it must be at most {high}")


def with_flags(text: str, names: Container[str]) -> str:
    """A message for the command line: settings that it names (in backticks, as Python knows them) become flags."""
    return _NAMED.sub(lambda match: flag_name(match[1]) if match[1] in names else match[0], text)


def flag_name(field_name: str) -> str:
    """`kv_gpu_tokens` → `--kv-gpu-tokens`."""
    return "--" + field_name.replace("_", "-")


def variable_name(field_name: str) -> str:
    """`kv_gpu_tokens` → `AMBIDEX_KV_GPU_TOKENS`."""
    return "AMBIDEX_" + field_name.upper()
