"""Settings of ``rlworker check``."""

from dataclasses import dataclass, field

from tyro.conf import Positional

from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from engines.validation import check_types
from hardware.platforms import DEFAULT_PLATFORM, PlatformName
from rlworker.checks.tiny_models import Tiny
from rlworker.config.model_checks import check_engines


@dataclass(frozen=True)
class CheckConfig:
    """Settings of ``rlworker check``: the model and the checks."""

    model: Positional[str] = ""
    """HuggingFace folder or hf:ORG/NAME; without one a tiny model is made on the spot."""
    tiny: Tiny = "qwen2"
    """Kind of that tiny model."""
    platform: PlatformName = DEFAULT_PLATFORM
    """Kind of machine the engines run on."""
    actor: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: VllmConfig = field(
        default_factory=lambda: VllmConfig(max_new_tokens=8, max_model_len=256, max_num_seqs=16, kv_cache_mb=256)
    )
    huggingface: bool = True
    """Compare with HuggingFace, which computes in this process before the engines start: in float64 where memory has
    16 bytes a weight and more."""
    self_test: bool = False
    """Plant known faults one at a time, into tiny models or the one given; each must be found."""
    json: bool = False
    """Print JSON in place of the table."""

    def __post_init__(self):
        check_types("check", self)
        if self.tiny != "qwen2" and (self.model or self.self_test):
            raise ValueError("check: tiny names the model that is made where none is given; leave it out")
        types = {self.actor.dtype, self.rollout.dtype}
        if self.self_test and (not self.huggingface or types != {"float32"}):
            raise ValueError(
                "check: the self-test's faults show in float32 and against HuggingFace; leave out --no-huggingface and "
                "--*.dtype"
            )

    def check_model(self) -> ModelSpec:
        """Return ``check_engines`` of the checked model."""
        return check_engines(self.model, self.platform, self.actor, self.rollout)
