"""`python -m farstep.doctor.make_env JSON`: builds and resets an environment, or exits with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from farstep.config.env import EnvConfig
from farstep.errors import FarstepError
from farstep.rollout.sources import Source


def main(arguments: Sequence[str]) -> None:
    """Exit with one sentence for an error of farstep. Errors of the environment itself keep their traceback."""
    source = Source.of(EnvConfig.of(json.loads(arguments[0])))
    try:
        env = source.build_vector(1, 0) if source.is_vector else source.build()
    except FarstepError as error:
        sys.exit(str(error))
    try:
        env.reset(seed=0)
    finally:
        env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
