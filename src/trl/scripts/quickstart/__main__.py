"""`python -m trl.scripts.quickstart`."""

import sys

from trl.scripts.quickstart import main

sys.exit(main())
