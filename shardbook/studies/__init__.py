"""What lessons run and no learner writes: small models cut in every way, trainings, data."""
