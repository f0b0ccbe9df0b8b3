"""Token bundles and the order in which a run reads them; `build` makes bundles from texts."""
