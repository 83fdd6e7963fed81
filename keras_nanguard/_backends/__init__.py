"""The transaction on each backend: one package per backend, with the interface in
`interface.py`.
"""
