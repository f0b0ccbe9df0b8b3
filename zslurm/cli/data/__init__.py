"""Token bundles: build, describe, verify."""
