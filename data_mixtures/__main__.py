"""`python -m data_mixtures <verb> key=value …`"""

import sys

from data_mixtures.cli import main

sys.exit(main(sys.argv[1:]))
