"""Workers as threads or as Ray actors, and the processes of a private Ray."""
