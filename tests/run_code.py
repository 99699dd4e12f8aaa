"""`python -m tests.run_code CODE` is `python -c CODE`, as a module that a fork with everything imported can run."""

import sys

exec(sys.argv[1])
