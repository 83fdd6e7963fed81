"""Runs the bad step of this bundle again and prints the outputs of every layer.

    python reproduce.py [MODEL.keras]
"""

import pathlib
import sys

from keras_nanguard import replay

# Classes and functions of your own that the model is made of: import them, and name them here.
# {"Block": Block}
custom_objects = {}

model = sys.argv[1] if len(sys.argv) > 1 else None
print(replay(pathlib.Path(__file__).parent, model, custom_objects=custom_objects))
