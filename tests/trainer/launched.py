"""What `launch` starts in each process: a module as a program, and an end that runs no destructors.

Threads of torch and gloo that still wait when the interpreter exits abort it now and then on a busy machine ("terminate
called without an active exception"), after all work is done.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
