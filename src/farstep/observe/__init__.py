"""What a run leaves to be looked at: metrics, the live display, plots, videos and the folder that holds them.

Nothing here knows of learners: each update is a step and flat metrics, such as {"env/return_mean": 21.5}.
"""

from __future__ import annotations
