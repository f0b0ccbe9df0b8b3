"""From text to token bundles."""
