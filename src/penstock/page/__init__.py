"""HTML pages that are one file: their style, and plots as SVG. It knows no package."""
