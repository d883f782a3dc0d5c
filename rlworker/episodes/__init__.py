"""Episodes: a play calls the model as often as it likes, and what the environment answers stands between the turns."""

from rlworker.episodes.episode import Episode
from rlworker.episodes.model import EpisodeLimit, Model, Play, Sample, ToolFailure, one_turn
from rlworker.episodes.tools.calls import answer_calls

__all__ = ["Episode", "EpisodeLimit", "Model", "Play", "Sample", "ToolFailure", "answer_calls", "one_turn"]
