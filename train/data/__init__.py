"""Read token bundles: which sequences a step trains on, in which order, and how they reach the device."""
