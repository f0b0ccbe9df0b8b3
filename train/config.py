"""The sections of a run's configuration that the trainer owns.

RUN_DIR/config.json holds these sections (and, when zslurm wrote it, others that the trainer ignores).
Every model here is frozen and forbids unknown keys; the field descriptions are what `zslurm config schema`
prints. Nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from train.errors import ConfigError


def _number_only(value: object) -> object:
    """Refuse what pydantic would quietly turn into a number: `true` and quoted digits."""
    if isinstance(value, bool | str):
        raise ValueError(f"expected a number, got {json.dumps(value)}")
    return value


_LARGEST = 2**53  # larger integers are not exact in floating point, nor in other people's JSON

Count = Annotated[int, Field(gt=0, le=_LARGEST), BeforeValidator(_number_only)]
Whole = Annotated[int, Field(ge=0, le=_LARGEST), BeforeValidator(_number_only)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number_only)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number_only)]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number_only)]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(_number_only)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, defaults checked like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds the {classes} classes")
        return self

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that RoPE rotates."""
        return int(self.head_dim * self.rotary_share)

    @property
    def router_classes(self) -> int:
        """Classes of the router: the experts, and the skip class where there is one."""
        return self.experts + int(self.skip_expert)


class DataConfig(Section):
    """Where the tokens come from."""

    path: str | None = Field(
        None, description="a token bundle (.h5), or a directory of them, made by `zslurm data build`"
    )
    isolate_documents: bool = Field(
        False, description="keep attention, convolutions and positions inside each document of a sequence"
    )


class OptimConfig(Section):
    """AdamW, clipping, and the balancing of experts."""

    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay rates")
    eps: Positive = Field(1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.1, description="decoupled decay; tensors of one dimension are not decayed")
    clip_norm: Positive | None = Field(1.0, description="largest global gradient norm; null turns it off")
    balance_lr: NonNegative = Field(1e-3, description="learning rate of the experts' balancing biases")
    balance_betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999), description="AdamW decay rates of the balancing biases"
    )
    balance_scope: Literal["global_batch", "microbatch"] = Field(
        "global_batch",
        description="what the load is balanced over: one step of the biases for the whole batch, or one for each "
        "microbatch in turn (all after the optimizer step, so that the number of ranks changes nothing)",
    )


class PhaseConfig(Section):
    """One phase of training: how many tokens, at which context, with which schedule."""

    name: str = Field("train", description="name of the phase, for people")
    tokens: Count = Field(description="tokens to train on in this phase")
    context: Annotated[int, Field(ge=2, le=_LARGEST), BeforeValidator(_number_only)] = Field(
        description="tokens in one sequence"
    )
    global_batch: Count = Field(description="sequences in one optimizer step, over all ranks")
    micro_batch: Count = Field(description="sequences in one forward pass: the unit of distribution")
    rope_base: Positive = Field(10_000.0, description="base of the rotary embedding")
    lr: Positive = Field(description="peak learning rate")
    final_lr: NonNegative = Field(0.0, description="learning rate at the end of the phase")
    warmup_steps: Whole = Field(0, description="steps of linear warm-up from zero")
    schedule: Literal["cosine"] = Field("cosine", description="shape of the decay from lr to final_lr")

    @model_validator(mode="after")
    def _batch_divides(self) -> PhaseConfig:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch ({self.global_batch}) must be a multiple of micro_batch ({self.micro_batch})"
            )
        if self.final_lr > self.lr:
            raise ValueError(f"final_lr ({self.final_lr:g}) must not exceed lr ({self.lr:g})")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds the phase's {self.steps} steps")
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.global_batch * self.context

    @property
    def steps(self) -> int:
        """Optimizer steps of this phase: enough for its tokens."""
        return -(-self.tokens // self.step_tokens)

    @property
    def microbatches(self) -> int:
        """Microbatches in one optimizer step."""
        return self.global_batch // self.micro_batch


class ParallelConfig(Section):
    """Devices, number formats and communication."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to train; `cuda` is also torch's name for AMD GPUs"
    )
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="format of weights and activations")
    gradient_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="format in which gradients are accumulated and reduced"
    )
    grouped_gemm: Literal["auto", "on", "off"] = Field(
        "auto",
        description="multiply all experts in one call: `on` wherever torch's operator can, `auto` on GPUs only, "
        "`off` in a loop",
    )
    recompute: bool = Field(
        False, description="keep only each layer's inputs for backward and compute its inside again"
    )
    compile: bool = Field(False, description="compile each layer with torch.compile")
    threads: Whole = Field(0, description="CPU threads of each rank; 0 shares the cores among local ranks")
    timeout_s: Positive = Field(1800.0, description="seconds after which a collective is given up")


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every_steps: Count = Field(500, description="optimizer steps between two checkpoints")
    keep_last: Count = Field(3, description="newest complete checkpoints that are kept")
    start_from: str | None = Field(
        None,
        description="a checkpoint whose weights a new run starts from: another run's, or an imported one "
        "(`zslurm checkpoint import`)",
    )


class TrainConfig(BaseModel):
    """The sections that the trainer reads from RUN_DIR/config.json; other sections are not its business."""

    model_config = ConfigDict(extra="ignore", frozen=True, validate_default=True)

    run: RunIdentity = RunIdentity()
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    phases: Annotated[tuple[PhaseConfig, ...], Field(min_length=1)]
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def load_train_config(path: Path) -> TrainConfig:
    """Read the trainer's sections from a resolved config.json.

    Raises:
        ConfigError: the file is missing, not JSON, or does not validate.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        # The launcher's own keys of `run` (directories and the like) are not the trainer's.
        run = {key: raw["run"][key] for key in RunIdentity.model_fields if key in raw.get("run", {})}
        return TrainConfig.model_validate({**raw, "run": run})
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; a run directory holds config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a run's configuration: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def model_fingerprint(model: ModelConfig) -> str:
    """SHA-256 of everything that decides the model's tensors and their meaning."""
    from checkpoint_tools import fingerprint  # numpy comes with it: not for those who only read a configuration

    # A setting that came later is left out where it changes nothing: older checkpoints stay readable.
    later = {"router"} if model.router == "mlp" else set()
    return fingerprint(model.model_dump(mode="json", exclude={"init_std"} | later))
