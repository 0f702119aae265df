"""Files of texts in, rows out. `run.py` is the run, by an engine here, a server or a Ray cluster; a folder a kind of rows
has what is asked (`task.py`), how, and how it is shown. Arguments, data, models and servers that cannot be used are a
CliError everywhere."""
