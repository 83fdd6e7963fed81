"""`python -m keras_nanguard`: the command line."""

import sys

from keras_nanguard._cli.parser import main

sys.exit(main())
