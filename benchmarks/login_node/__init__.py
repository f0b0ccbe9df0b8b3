"""Commands on the login node: how fast they start and answer."""
