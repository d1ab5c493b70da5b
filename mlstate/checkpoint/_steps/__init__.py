"""Rules for the steps of a run: when one is saved, which are kept, which one a load reads."""
