"""`python -m keras_nanguard`: the command line."""

import sys

from keras_nanguard._cli._parser import main

sys.exit(main())
