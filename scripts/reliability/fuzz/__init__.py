"""Generated messages for every RPC and every HTTP route, valid and broken: `make fuzz`."""
