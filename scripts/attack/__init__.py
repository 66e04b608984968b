"""The attacks: what one client, with a key or without, can do to a neighbour and to the coordinator. `make attack`."""
