"""`python -m keras_nanguard`: the command line."""

import sys

from keras_nanguard._cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
