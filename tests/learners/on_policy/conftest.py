"""As in tests/learning, each learner has one thread, and its workers have imported torch."""

from tests.learning.conftest import one_thread as one_thread
