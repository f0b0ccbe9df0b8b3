"""Settings of Sphinx for the site."""

project = "zslurm"
html_title = "zslurm"
smartquotes = False  # a reader pastes commands, and `--` is no dash
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_show_copyright = False
html_copy_source = False
html_permalinks_icon = "#"
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # output of programs is no valid code of any language
