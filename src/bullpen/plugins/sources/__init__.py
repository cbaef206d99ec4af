"""Where domain events come from. Each module is one kind of event store."""
