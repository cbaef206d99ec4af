"""For operators: metrics, health, logs, dead letters of all parts, and a doctor."""
