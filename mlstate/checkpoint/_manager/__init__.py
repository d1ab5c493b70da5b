"""Managers of the steps of a run: saves, restores, deletion of old steps and files."""
