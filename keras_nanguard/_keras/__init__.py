"""The one room that knows the insides of Keras: a release of Keras that changes them breaks nothing outside of it."""
