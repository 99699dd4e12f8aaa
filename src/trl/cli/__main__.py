"""`python -m trl.cli`: the `trl` command of this interpreter."""

import sys

from trl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
