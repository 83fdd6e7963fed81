"""How a model file of each kind becomes `contents.Contents`, whose arrays are read in pieces. No
module here imports a backend.
"""
