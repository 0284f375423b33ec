"""The gradient noise scale (McCandlish et al. 2018): how many rows a batch needs before more rows hardly help.

With `G` the true gradient and `S` the trace of the covariance of one row's gradient, the squared norm of the mean
gradient of `b` rows has the expectation `|G|^2 + S / b`. An update with minibatches of together `B` rows therefore
gives unbiased estimates of both, from `k` minibatches (small) and from their mean (large):

    small = sum of rows_i / B * |g_i|^2     expectation |G|^2 + S * k / B
    large = |sum of rows_i / B * g_i|^2     expectation |G|^2 + S / B
    S = (small - large) * B / (k - 1)
    |G|^2 = large - S / B

The noise scale is `S / |G|^2`, in rows. Single estimates are noisy, and the ratio of two unbiased estimates is biased,
so both are averaged over updates before they are divided.
"""

from __future__ import annotations

import math

from farstep.core import Nested
from farstep.errors import ConfigError


class GradientNoise:
    """Estimates the gradient noise scale from the gradients of minibatches.

    The estimate assumes independent rows and a gradient that hardly changes during the minibatches of one update. Rows
    of one trajectory are correlated, so treat the result as an order of magnitude.

    Args:
        decay: Weight of earlier updates in the running means of `S` and `|G|^2`, from 0 to below 1; default 0.9, which
            averages over about 10 updates.

    Raises:
        ConfigError: `decay` is out of range.

    Example:
        for rows in minibatches:
            loss(rows).backward()
            noise.add(flat_gradient, len(rows))
            optimizer.step()
        if (scale := noise.end_update()) is not None:
            flow.put("noise_scale", scale)
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not isinstance(decay, float | int) or not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay!r}; expected a number from 0 to below 1.")
        self._decay = decay
        self.trace = 0.0
        """Running mean of `S`, not corrected for its start at 0; the correction cancels in the ratio."""
        self.squared_norm = 0.0
        """Running mean of `|G|^2`, likewise. Below 0 if the noise hides the gradient."""
        self._clear()

    def _clear(self) -> None:
        self._sum: Nested = None
        self._small, self._rows, self._count = 0.0, 0, 0

    def add(self, gradient: Nested, rows: int) -> None:
        """Add the gradient of one minibatch, before clipping. A gradient that is not finite is ignored.

        Args:
            gradient: The gradient of the mean loss, as a vector: a NumPy array or a torch tensor. It is not kept.
            rows: Number of rows of the minibatch.
        """
        squared = float(gradient @ gradient)
        if not math.isfinite(squared) or rows < 1:
            return
        weighted = gradient * rows
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._small += squared * rows
        self._rows += rows
        self._count += 1

    def end_update(self) -> float | None:
        """Update the running means with the minibatches since the last call. Fewer than two of them change nothing.

        Returns:
            `value`.
        """
        rows, count = self._rows, self._count
        if count > 1:
            small, large = self._small / rows, float(self._sum @ self._sum) / rows**2
            trace = max(0.0, small - large) * rows / (count - 1)  # below 0 only by rounding
            self.trace = self._decay * self.trace + (1 - self._decay) * trace
            self.squared_norm = self._decay * self.squared_norm + (1 - self._decay) * (large - trace / rows)
        self._clear()
        return self.value

    @property
    def value(self) -> float | None:
        """The noise scale in rows; infinite if the noise hides the gradient, None before the first estimate."""
        if self.squared_norm > 0:
            return self.trace / self.squared_norm
        return math.inf if self.trace > 0 else None
