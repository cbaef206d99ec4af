"""State machines driven by events, whatever brings the events."""
