"""Messages at nine in the morning where the recipient lives. Needs the extra `postgres` or `sqlite`."""
