"""Shared by all other packages: records, errors, the definition of "finite", atomic files. Imports
neither Keras nor a backend."""
