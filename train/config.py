"""The sections of a run's configuration that the trainer owns.

RUN_DIR/config.json holds these sections (and, when zslurm wrote it, others that the trainer ignores). The field
descriptions are what `zslurm config schema` prints. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from zslurm.checkpoint_tools.plain import Unexpected, load_json
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import ConfigError
from zslurm.train.sections.metrics_config import EvaluationConfig, MetricsConfig
from zslurm.train.sections.phases import Packing, PhaseConfig
from zslurm.train.sections.section import Count, Fraction, NonNegative, Positive, Section, Share, Whole

RESUMED_FROM = "resumed_from"
"""Key of a checkpoint's cursor: the value of checkpoint.resume_from in the run that made it."""

SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class RunIdentity(Section):
    """What the trainer needs to know of the run itself."""

    name: str = Field("run", description="name of the run; its directory under runs_dir")
    seed: Whole = Field(0, description="seed of the initial weights and of the data order")


class ModelConfig(Section):
    """A ZAYA1 model. The defaults are ZAYA1-base (arXiv 2511.17127)."""

    vocab_size: Count = Field(262272, description="rows of the (tied) embedding")
    hidden_size: Count = Field(2048, description="width of the residual stream")
    layers: Count = Field(40, description="layers, each an attention stage and an expert stage")
    query_heads: Count = Field(8, description="compressed query heads")
    kv_heads: Count = Field(2, description="compressed key and value heads")
    head_dim: Count = Field(128, description="channels of one head")
    conv_widths: tuple[Count, Count] = Field(
        (2, 2), description="widths of the depthwise and of the grouped causal convolution over q and k"
    )
    rotary_share: Share = Field(0.5, description="share of each head that is rotated by RoPE")
    experts: Count = Field(16, description="experts in each expert stage")
    experts_per_token: Count = Field(1, description="experts that each token is sent to")
    expert_hidden_size: Count = Field(2048, description="inner width of one expert")
    router: Literal["mlp", "linear"] = Field(
        "mlp",
        description="ZAYA1's router, an MLP over a state averaged over depth; or one matrix, to compare with",
    )
    router_hidden_size: Count = Field(256, description="width of the router's MLP")
    skip_expert: bool = Field(True, description="one more router class that skips the experts")
    skip_rule: Literal["identity", "zero"] = Field(
        "identity", description="what a skipped token gets: its normed input times the probability, or zero"
    )
    norm_eps: Positive = Field(1e-5, description="epsilon of every RMSNorm")
    init_std: Positive = Field(0.02, description="standard deviation of initial matrices")

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if (self.kv_heads * self.head_dim) % 2:
            raise ValueError(
                f"kv_heads * head_dim ({self.kv_heads} * {self.head_dim}) must be even: "
                "half of the value channels come from the previous token"
            )
        rotary = self.head_dim * self.rotary_share
        if rotary != int(rotary) or int(rotary) % 2:
            raise ValueError(
                f"head_dim * rotary_share ({self.head_dim} * {self.rotary_share} = {rotary:g}) "
                "must be an even number of channels"
            )
        classes = self.experts + int(self.skip_expert)
        if self.experts_per_token > classes:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) exceeds the {counted(classes, 'class')}"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that RoPE rotates."""
        return int(self.head_dim * self.rotary_share)

    @property
    def router_classes(self) -> int:
        """Classes of the router: the experts, and the skip class if there is one."""
        return self.experts + int(self.skip_expert)


class DataConfig(Section):
    """Where the tokens come from."""

    path: str | None = Field(
        None, description="a token bundle (.h5), or a directory of them, made by `zslurm data build`"
    )
    sources: dict[SourceName, str] = Field(
        default_factory=dict,
        description="instead of one path, several bundles by name, to be mixed by phases[].mix",
    )
    packing: Packing = Field(
        "windows",
        description="how documents become sequences: the stream of tokens, cut every `context` of them (windows), "
        "or whole documents side by side, each as if it were alone (best_fit)",
    )
    long_documents: Literal["split", "trim", "refuse"] = Field(
        "split",
        description="what best_fit does with a document that is longer than a sequence: parts of it, its "
        "beginning only, or no run",
    )
    max_epochs: Positive | None = Field(
        None,
        description="refuse a run that would take more than so many epochs of a source; default: a source that "
        "ends begins again, in another order",
    )
    isolate_documents: bool = Field(
        False,
        description="keep attention, convolutions and positions inside each document of a sequence, which "
        "best_fit always does",
    )
    prefetch: Whole = Field(2, description="microbatches that each rank reads ahead in the background; 0: none")

    @model_validator(mode="after")
    def _one_or_many(self) -> DataConfig:
        if self.path is not None and self.sources:
            raise ValueError("give path or sources, not both")
        return self

    def isolates(self, phase: PhaseConfig) -> bool:
        """Return whether a phase keeps the documents of a sequence apart."""
        return self.isolate_documents or (phase.packing or self.packing) == "best_fit"


class MuonConfig(Section):
    """Muon, for matrices: momentum, orthogonalised by Newton-Schulz steps (arXiv 2502.16982)."""

    momentum: Fraction = Field(0.95, description="decay rate of the momentum")
    nesterov: bool = Field(True, description="look ahead by one momentum step")
    steps: Count = Field(5, description="Newton-Schulz steps")
    coefficients: Literal["keller", "you", "polar_express", "deepseek_v4"] = Field(
        "keller", description="polynomial of each Newton-Schulz step; see train/optim/newton_schulz.py"
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="format of the Newton-Schulz products")
    scale: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="what the learning rate is multiplied by: 0.2 sqrt(max(m, n)), so that AdamW's rates fit, or "
        "sqrt(max(1, m / n))",
    )
    lr_factor: Positive = Field(1.0, description="learning rate of matrices, as a multiple of phases[].lr")
    split_gate_up: bool = Field(
        False, description="orthogonalise the gate and the up half of an expert's first matrix apart"
    )


class OptimConfig(Section):
    """Muon for matrices and AdamW for the rest, clipping, unusual steps, and the balancing of experts."""

    matrices: Literal["muon", "adamw"] = Field(
        "muon", description="optimizer of 2-D weights and of each expert's matrices; all else is AdamW's"
    )
    muon: MuonConfig = Field(MuonConfig(), description="how Muon updates them")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay rates")
    eps: Positive = Field(1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.1, description="decoupled decay; tensors of one dimension are not decayed")
    clip_norm: Positive | None = Field(1.0, description="largest global gradient norm; null turns it off")
    z_loss: NonNegative = Field(
        0.0, description="weight of the mean squared log-sum-exp of the logits, added to the loss (PaLM's is 1e-4)"
    )
    skip_limit: Whole = Field(
        5, description="steps in a row that may be skipped (not finite, or a spike); one more stops the run"
    )
    spike_factor: Positive | None = Field(
        None,
        description="skip a step whose loss or gradient norm is above so many recent medians; null: never",
    )
    spike_window: Count = Field(64, description="steps that the recent median is taken over")
    balance_lr: NonNegative = Field(1e-3, description="learning rate of the experts' balancing biases")
    balance_scope: Literal["global_batch", "microbatch"] = Field(
        "global_batch",
        description="what the load is balanced over: one step of the biases for the whole batch, or one for each "
        "microbatch in turn (all after the optimizer step, so that the number of ranks changes nothing)",
    )


def _recompute_only(value: object) -> object:
    """Refuse with one message what is none of the forms, which a union would refuse with one for each."""
    if value == "auto" or isinstance(value, bool) or (isinstance(value, int) and value >= 0):
        return value
    raise ValueError(f"expected true, false, a number of layers or auto, got {json.dumps(value, default=str)}")


Recompute = Annotated[bool | int | Literal["auto"], BeforeValidator(_recompute_only)]


class ParallelConfig(Section):
    """Devices, number formats and communication."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to train; `cuda` is also torch's name for AMD GPUs"
    )
    dtype: Literal["fp32", "bf16", "fp64"] = Field(
        "bf16", description="format of weights and activations; fp64 is for tests of exactness"
    )
    gradient_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="format in which gradients are accumulated"
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = Field(
        None, description="format in which gradients are summed over ranks; default: gradient_dtype"
    )
    bucket_mb: Positive | None = Field(
        None,
        description="MiB of gradients in one reduction; default: the fewest with which at most a tenth of the "
        "predicted communication time is latency, by the numbers of nodes and of ranks on each; at least 64",
    )
    overlap: Literal["auto", True, False] = Field(
        "auto",
        description="reduce each bucket while backward runs; auto: on GPUs, and on CPUs if the ranks' threads "
        "leave cores free",
    )
    deterministic: bool = Field(
        False,
        description="use torch's deterministic algorithms only, so that a run on GPUs repeats bit for bit; "
        "slower, and an operation without such an algorithm ends the run",
    )
    collectives: Literal["auto", "flat", "two_level"] = Field(
        "auto",
        description="ZeRO-1's collectives: one ring over all ranks (flat), or inside each node and then along "
        "the rails (two_level); auto: two_level on several nodes of a cluster whose profile has rails_only, else "
        "flat",
    )
    context_attention: Literal["auto", "ring", "all_gather"] = Field(
        "auto",
        description="attention if phases[].context_parallel is above 1: keys and values go round the ranks "
        "(ring), or every rank collects all of them (all_gather)",
    )
    attention: Literal["auto", "sdpa", "flash_attn", "aiter"] = Field(
        "auto",
        description="attention kernels: torch's own (sdpa), those of an installed package, or (auto) torch's, but "
        "on gfx942 those of an installed AITER if they fit",
    )
    grouped_gemm: Literal["auto", "on", "off", "triton", "torch", "aiter"] = Field(
        "auto",
        description="what multiplies the experts: a loop (off), kernels in Triton, torch's grouped_mm (torch, or "
        "on), those of the installed package AITER (aiter), or what is fastest on this device (auto)",
    )
    recompute: Recompute = Field(
        False,
        description="keep only a layer's inputs for backward and compute its inside again: every layer's (true), "
        "that of so many, the first ones, or of as few as the GPU's memory asks for by the plan (auto)",
    )
    compile: bool = Field(False, description="compile each layer with torch.compile")
    threads: Whole = Field(0, description="CPU threads of each rank; 0 shares the cores among local ranks")
    timeout_s: Positive = Field(1800.0, description="seconds after which a collective is given up")


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every_steps: Count = Field(500, description="optimizer steps between two checkpoints")
    keep_last: Count = Field(3, description="newest complete checkpoints that are kept")
    keep_every: Whole = Field(0, description="also keep those whose step is a multiple of this; 0: none")
    best_by: str = Field(
        "loss",
        pattern=r"^(loss|[^/]+/[^/]+)$",
        description="what makes a checkpoint the best, which is kept too: the lowest loss on evaluation.data, or "
        "TASK/METRIC of evaluation.tasks, such as hellaswag/acc_norm",
    )
    background: bool = Field(
        True,
        description="write while training continues, from a copy of the state in host memory; false: without that "
        "memory, and training waits",
    )
    failures: Whole = Field(
        3,
        description="failed saves in a row that a run survives; one more, or a failed last save, ends it. A full "
        "disk pauses saves instead",
    )
    resume_from: str | None = Field(
        None,
        description="a checkpoint to resume from, and no other; saved on from there, a run takes its own newest",
    )
    rescue_dir: str | None = Field(
        None,
        description="directory, shared by all nodes, for the last checkpoint of a run whose own directory was "
        "moved or removed while it trained: RESCUE_DIR/NAME/checkpoints; default: that run stops without a save",
    )
    local_dir: str | None = Field(
        None,
        description="directory on each node (NVMe, /dev/shm) that keeps its newest shards for restarts in place",
    )


class RecoveryConfig(Section):
    """Copies of the training state in host memory, for recovery without a restart (`aegis.recovery: memory`)."""

    every_steps: Count = Field(1, description="optimizer steps between two copies of the state")
    memory_gb: Positive | None = Field(
        None,
        description="GiB of host memory that the copies may take on a node; a run that needs more is refused; "
        "default: what is free",
    )
    wait_s: Positive = Field(
        30.0,
        description="seconds that a rank which lost its peers waits to be regrouped before it ends with the error",
    )


class IntegrityConfig(Section):
    """Whether what is computed, sent and kept is right (docs/integrity.md)."""

    every_steps: Whole = Field(
        0,
        description="optimizer steps between two checks, in which another rank computes a microbatch again and "
        "weights and gradients are compared over ranks; masters and moments are checked in every step; 0: never",
    )


def _kind_and_folder(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"(hf|ckpt):.+", value):
        expected = "hf:DIR (a folder in transformers' format) or ckpt:DIR (a checkpoint)"
        raise ValueError(f"expected {expected}, got {json.dumps(value)}")
    return value


Init = Annotated[
    str | None,
    AfterValidator(_kind_and_folder),
    Field(
        description="weights that a new run starts from, with a fresh optimizer: hf:DIR (transformers' format) or "
        "ckpt:DIR (a checkpoint)"
    ),
]


class TrainConfig(Section):
    """The sections that the trainer reads from RUN_DIR/config.json; it ignores the others."""

    model_config = ConfigDict(extra="ignore")

    run: RunIdentity = RunIdentity()
    init: Init = None
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    phases: Annotated[tuple[PhaseConfig, ...], Field(min_length=1)]
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    metrics: MetricsConfig = MetricsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _mixes_its_own_sources(self) -> Self:
        sources = self.data.sources
        for index, phase in enumerate(self.phases):
            key = f"phases[{index}].mix"
            if phase.mix and not sources:
                raise ValueError(f"{key}: needs data.sources, the names and paths of what is mixed")
            if unknown := next((name for name in phase.mix if name not in sources), None):
                near = difflib.get_close_matches(unknown, sources, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(sources)}"
                raise ValueError(f"{key}.{unknown}: is not in data.sources; {hint}")
            if phase.mix and not any(phase.mix.values()):
                raise ValueError(f"{key}: every share is 0; give at least one source more")
        return self

    @model_validator(mode="after")
    def _is_best_by_what_it_evaluates(self) -> Self:
        best_by = self.checkpoint.best_by
        if best_by != "loss" and not self.evaluation.tasks:
            raise ValueError(f"checkpoint.best_by ({best_by}) needs evaluation.tasks, which names no task")
        return self

    @model_validator(mode="after")
    def _recomputes_its_own_layers(self) -> Self:
        asked, layers = self.parallel.recompute, self.model.layers
        if asked != "auto" and asked > layers:
            raise ValueError(f"parallel.recompute ({asked}) exceeds the model's {counted(layers, 'layer')}")
        return self

    @model_validator(mode="after")
    def _profiles_its_own_steps(self) -> Self:
        metrics, last = self.metrics, self.total_steps
        if metrics.profile_steps is not None and metrics.profile_steps[1] > last:
            raise ValueError(f"metrics.profile ({metrics.profile}) ends after the last step, {last}")
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)


def load_train_config(path: Path) -> TrainConfig:
    """Read the trainer's sections from a resolved config.json.

    Raises:
        ConfigError: the file is missing, not JSON, or does not validate.
    """
    try:
        raw: dict[str, Any] = load_json(path.read_bytes())
        if not isinstance(raw, dict) or not isinstance(raw.get("run", {}), dict):
            raise Unexpected("its content is not of the expected form")
        # The launcher's own keys of `run` (directories and the like) are not the trainer's.
        run = {key: raw["run"][key] for key in RunIdentity.model_fields if key in raw.get("run", {})}
        return TrainConfig.model_validate({**raw, "run": run})
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; a run directory holds config.json") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except Unexpected as error:
        raise ConfigError(f"{path}: not a run's configuration: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(word) for word in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error


def model_differences(ours: ModelConfig, theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys in which the model of some weights, as a mapping, differs from a run's; a clause for each.

    A setting that the mapping lacks is newer than the weights, and was at its default, whatever that was called.
    """
    own_values = ours.model_dump(mode="json")
    other_values = ModelConfig().model_dump(mode="json") | dict(theirs)
    return [
        f"model.{key} is {own_values.get(key)!r}, the weights have {other_values.get(key)!r}"
        for key in sorted(own_values.keys() | other_values.keys())
        if key != "init_std" and own_values.get(key) != other_values.get(key)
    ]
