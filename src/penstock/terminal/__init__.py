"""Terminal output on `rich`: tables and progress bars; what is no terminal gets plain lines. It knows no package."""
