"""Modules that several subsystems of the package use."""
