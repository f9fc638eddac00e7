"""Texts and calibration samples."""
