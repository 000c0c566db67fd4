"""Views of a run: terminal, report page, pictures, tables."""
