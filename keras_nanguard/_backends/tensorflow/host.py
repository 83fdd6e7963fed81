"""Process functions of TensorFlow, which Keras runs in one process."""

from __future__ import annotations

from keras_nanguard._backends.interface import Host as Host
