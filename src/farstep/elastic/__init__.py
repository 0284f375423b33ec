"""Elastic actors: when to start workers, how many to use, and who holds which resource."""

from farstep.elastic.noise_scale import GradientNoise
from farstep.elastic.scaling import Fill, NoiseScale, Rule, Schedule, Signals

__all__ = ["Fill", "GradientNoise", "NoiseScale", "Rule", "Schedule", "Signals"]
