"""`python -m farstep`: the command line."""

from farstep.cli import main

raise SystemExit(main())
