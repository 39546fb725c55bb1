"""``python -m zdtrain.lint`` is ``zdtrain lint``."""

import sys

from zdtrain.lint.cli import main

sys.exit(main())
