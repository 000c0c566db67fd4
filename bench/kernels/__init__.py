"""How fast and how exact each kernel is, and whether it compiles for every chip."""
