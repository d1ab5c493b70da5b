"""Managers of the steps of a run: saves, restores, deletion of steps that nobody needs."""
