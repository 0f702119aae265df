"""Labels over files: readers, templates, tables, report, and the ways to run them."""
