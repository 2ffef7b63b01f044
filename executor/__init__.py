"""The steps of the simulator run for real: a small hybrid model, calibration, verification."""
