"""Labels over files: readers, templates, tables, report, and the ways to run them. Arguments, data, models and servers
that cannot be used are a CliError everywhere."""
