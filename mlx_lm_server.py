"""`python -m mlx_lm_server`: hands over to the command line."""

import sys

from services.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
