"""The folder of the site's profiles, as in the tests of profiles."""

from tests.cluster.conftest import site

__all__ = ["site"]
