"""Files of texts in, rows out. `run.py` is the run, by an engine here, a server or a Ray cluster; a kind of rows has a
folder: what is asked, how (`task.py`), and how it is shown. Arguments, data, models and servers that cannot be used are
a CliError everywhere."""
