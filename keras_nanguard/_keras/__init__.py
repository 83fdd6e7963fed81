"""Everything that uses Keras internals: a release of Keras that changes them breaks only this
package.
"""
