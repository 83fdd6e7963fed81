"""The transaction, fault injection and replay on TensorFlow."""
