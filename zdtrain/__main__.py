"""`python -m zdtrain` is the `zdtrain` command."""

import sys

from zdtrain.cli import main

sys.exit(main())
