"""PyTorch's caching allocator, replayed from its own history. Nothing here imports torch."""

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.rounding import round_size, segment_size
from memfit.allocator.timeline import disagreement, timeline

__all__ = ["AllocatorConfig", "disagreement", "round_size", "segment_size", "timeline"]
