"""Object stores for payloads that are too large for a job."""
