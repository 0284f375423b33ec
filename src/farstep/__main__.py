"""`python -m farstep`: the command line."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, where a file named json.py would be imported; `main` adds it if it is needed

from farstep.cli import main

raise SystemExit(main())
