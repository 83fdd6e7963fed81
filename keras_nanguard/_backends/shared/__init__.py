"""What the backends have in common. Nothing in here asks which of them runs, but through
`_backends.current`.
"""
