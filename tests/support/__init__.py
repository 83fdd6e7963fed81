"""What the tests share: models, data, programs, the oracle, and scripts that run in processes of their own."""
