"""Reading texts and making calibration samples."""
