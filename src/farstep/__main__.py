"""`python -m farstep`: the command line."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: a json.py in it would shadow the standard module; `main` adds it if needed

from farstep.cli import main

raise SystemExit(main())
