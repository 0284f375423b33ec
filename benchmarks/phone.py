"""A task in the manner of device control: instruction and screen are sequences of tokens, and only success pays.

The instruction names an app and one of its entries, between words without meaning. The agent opens the app from the
home screen, scrolls to the page of the entry, selects it and submits. Submitting the right entry pays 1, and every
submission ends the episode. An action without effect is marked by `info["invalid_action"]`.

Steps take time, as those of an emulator do, and each phone has a speed of its own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

APPS, PAGES, ROWS = 3, 2, 2
ENTRIES = PAGES * ROWS
SYNONYMS = 1
"""Number of words for each app, and for each entry."""
FILLERS = 4
"""Words without meaning; each instruction has two of them."""
MAX_STEPS = 12
TAPS = max(APPS, ROWS)
"""Places of the screen that can be tapped: actions 0, 1, ..."""
SCROLL, BACK, SUBMIT = range(TAPS, TAPS + 3)
NUM_ACTIONS = TAPS + 3

PAD, HOME = 0, 1
_TOKENS = itertools.count(2)
FILLER_WORDS = [next(_TOKENS) for _ in range(FILLERS)]
APP_WORDS = [[next(_TOKENS) for _ in range(SYNONYMS)] for _ in range(APPS)]
ENTRY_WORDS = [[next(_TOKENS) for _ in range(SYNONYMS)] for _ in range(ENTRIES)]
APP_LABELS = [next(_TOKENS) for _ in range(APPS)]
ENTRY_LABELS = [next(_TOKENS) for _ in range(ENTRIES)]
VOCABULARY = next(_TOKENS)
INSTRUCTION, SCREEN = 4, 2 + TAPS
"""Tokens of the instruction; tokens of the screen: its title, the selected entry, and one for each place."""
LAYOUTS = np.stack([np.random.default_rng(app).permutation(ENTRIES) for app in range(APPS)])
"""Order of the entries of each app, page after page."""


class Phone(gym.Env[Any, Any]):
    """One phone.

    Args:
        low_s: Shortest duration of a step, in seconds; 0: steps take no time.
        high_s: Longest duration. Each phone draws its own, log-uniformly, at its first reset.
    """

    observation_space = spaces.MultiDiscrete(np.full(INSTRUCTION + SCREEN, VOCABULARY))
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, low_s: float = 0.0, high_s: float = 0.0) -> None:
        self._range_s = (low_s, high_s)
        self._step_s: float | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        random = self.np_random
        if self._step_s is None:
            low_s, high_s = self._range_s
            self._step_s = math.exp(random.uniform(math.log(low_s), math.log(high_s))) if low_s else 0.0
        self._app, self._entry = int(random.integers(APPS)), int(random.integers(ENTRIES))
        app, entry = (words[random.integers(SYNONYMS)] for words in (APP_WORDS[self._app], ENTRY_WORDS[self._entry]))
        first, second = (FILLER_WORDS[random.integers(FILLERS)] for _ in range(2))
        self._instruction = [first, app, second, entry]
        self._opened: int | None = None
        self._selected: int | None = None
        self._page = self._steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._step_s:
            time.sleep(self._step_s)
        self._steps += 1
        is_valid = self._act(int(action))
        submitted = is_valid and int(action) == SUBMIT
        is_right = (self._opened, self._selected) == (self._app, self._entry)
        ended = submitted or self._steps == MAX_STEPS
        return self._observed(), float(submitted and is_right), ended, False, {"invalid_action": not is_valid}

    def _act(self, action: int) -> bool:
        """Change the screen; returns whether the action had an effect."""
        if action == SUBMIT:
            return self._selected is not None
        if self._opened is None:
            if action >= APPS:
                return False
            self._opened, self._page = action, 0
        elif action == SCROLL:
            self._page = (self._page + 1) % PAGES
        elif action == BACK:
            self._opened = self._selected = None
        elif action >= ROWS:
            return False
        else:
            self._selected = shown(self._opened, self._page)[action]
        return True

    def _observed(self) -> Any:
        if self._opened is None:
            title, selected, places = HOME, PAD, APP_LABELS
        else:
            title = APP_LABELS[self._opened]
            selected = PAD if self._selected is None else ENTRY_LABELS[self._selected]
            places = [ENTRY_LABELS[entry] for entry in shown(self._opened, self._page)]
        padding = [PAD] * (TAPS - len(places))
        return np.array([*self._instruction, title, selected, *places, *padding], np.int64)


def shown(app: int, page: int) -> list[int]:
    """The entries on a page of an app."""
    return [int(entry) for entry in LAYOUTS[app][page * ROWS : (page + 1) * ROWS]]


class Demonstrator:
    """Does the next right action, or with some probability any action; a policy to record episodes from.

    Args:
        noise: Probability of an action that is drawn uniformly.
        seed: Seed of the draws.
    """

    def __init__(self, noise: float, seed: int) -> None:
        self._noise, self._rng = noise, np.random.default_rng(seed)

    def act(self, obs: Any) -> dict[str, Any]:
        right = np.array([right_action(row.tolist()) for row in np.asarray(obs)])
        is_any = self._rng.random(len(right)) < self._noise
        action = np.where(is_any, self._rng.integers(NUM_ACTIONS, size=len(right)), right)
        probability = self._noise / NUM_ACTIONS + (1 - self._noise) * (action == right)
        return {"action": action, "logprob": np.log(probability).astype(np.float32)}

    def get_parameters(self) -> dict[str, Any]:
        return {}

    def set_parameters(self, parameters: Any) -> None:
        """Do nothing: there are no parameters."""


def right_action(tokens: Sequence[int]) -> int:
    """The next action that leads to success, from an observation."""
    app = next(i for i, words in enumerate(APP_WORDS) if tokens[1] in words)
    label = next(ENTRY_LABELS[i] for i, words in enumerate(ENTRY_WORDS) if tokens[3] in words)
    title, selected, *places = tokens[INSTRUCTION:]
    if title == HOME:
        return app
    if title != APP_LABELS[app]:
        return BACK
    if selected == label:
        return SUBMIT
    return places.index(label) if label in places else SCROLL
