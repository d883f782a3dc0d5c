"""Settings of ``rlworker check`` and ``rlworker bisect``."""

from dataclasses import dataclass, field

from tyro.conf import Positional

from engines.config import MegatronConfig, VllmConfig
from engines.config.rollout import find_weight_way
from engines.models.spec import ModelSpec
from engines.validation import check_types
from hardware.platforms import DEFAULT_PLATFORM, PlatformName, get_platform
from hardware.vllm_versions import check_vllm
from rlworker.checks.tiny.models import Tiny
from rlworker.config.model_checks import check_engines


@dataclass(frozen=True)
class CheckConfig:
    """Settings of ``rlworker check``: the model to check, its sizes, and the references to compare with."""

    model: Positional[str] = ""
    """HuggingFace folder or hf:ORG/NAME of the model to check; empty makes a tiny model on the spot."""
    tiny: Tiny = "qwen2"
    """Family of the tiny model."""
    family: str = ""
    """HuggingFace model_type. With a file in engines/models/families a tiny model of it is checked. Without one, what
    it lacks is told: tensors that no join takes, rules, positions and settings."""
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine that the engines run on."""
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: VllmConfig = field(
        default_factory=lambda: VllmConfig(max_new_tokens=8, max_model_len=256, max_num_seqs=16, kv_cache_mb=256)
    )
    huggingface: bool = True
    """Compare with HuggingFace transformers, in float64 where memory has at least 16 bytes for each weight."""
    self_test: bool = False
    """Plant known faults one at a time, into tiny models, into that of tiny alone, or into the given one; the check
    must find each."""
    ignore_versions: bool = False
    """Start with a version of vLLM that this project never ran with, or that does not fit torch, and say so."""
    json: bool = False
    """Print JSON in place of the table."""

    def __post_init__(self):
        check_types("check", self)
        if self.tiny != "qwen2" and self.model:
            raise ValueError(
                "check: --tiny chooses the model that is made if none is named, and a model is named; leave --tiny out"
            )
        if self.family and (self.model or self.tiny != "qwen2" or self.self_test):
            raise ValueError(
                "check: --family makes a tiny model of its own, and a model, --tiny or --self-test is given beside it; "
                "leave those out"
            )
        types = {self.actor.dtype, self.rollout.dtype}
        if self.self_test and (not self.huggingface or types != {"float32"}):
            raise ValueError(
                "check: the faults of --self-test show only in float32 and against HuggingFace; leave out "
                "--no-huggingface, --actor.dtype and --rollout.dtype"
            )

    def check_model(self) -> ModelSpec:
        """Check the model with ``check_engines`` against both engines, and return its spec."""
        check_vllm(self.ignore_versions)
        find_weight_way(self.rollout, get_platform(self.platform), colocated=False)
        return check_engines(self.model, self.platform, self.actor, self.rollout)


@dataclass(frozen=True)
class BisectConfig:
    """Settings of ``rlworker bisect``."""

    model: Positional[str] = ""
    """HuggingFace folder, hf:ORG/NAME, or a run's checkpoint."""
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine that the engines run on."""
    rows: str = ""
    """JSONL file of sequences, ids each, such as RUN/rejected/step_000007.jsonl; empty makes awkward ones."""
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: VllmConfig = field(default_factory=lambda: VllmConfig(max_model_len=1024, max_num_seqs=4, kv_cache_mb=256))
    ignore_versions: bool = False
    """Start with a version of vLLM that this project never ran with, or that does not fit torch, and say so."""
    json: bool = False
    """Print JSON in place of the table."""

    def __post_init__(self):
        check_types("bisect", self)
