"""What every other package shares: records, errors, the definition of finite, whole files. Imports neither Keras nor a backend."""
