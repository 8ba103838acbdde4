"""``python -m tercet`` is the ``tercet`` command."""

import sys

from tercet.cli.main import main

sys.exit(main())
