"""The state of machine-learning models: fast, safe, clear.

Arrays are used where they lie, files commit atomically or not at all, and every fast path
is judged by a clear slow one.
"""
