"""Building token bundles, and reading them."""
