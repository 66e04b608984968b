"""What coordinator and workers say to each other: messages, protocols, settings, limits, failpoints."""
